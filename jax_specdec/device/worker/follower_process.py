"""A follower's process: it computes a model together with its lead, and sends nothing."""

import sys

from jax_specdec.control import Start, from_line
from jax_specdec.device.worker.process_group import end_with, join, leave
from jax_specdec.device.worker.worker_process import make_worker


class Silent:
    """The sender of a process that publishes nothing."""

    def send(self, data: object, /) -> None:
        """Refuse a message: two processes would publish the same one."""
        raise RuntimeError("a follower publishes nothing: its lead does")


def main(arguments: list[str]) -> int:
    """Entry point: the lead's commands come on stdin, and the first is the lead's `Start`.

    Args:
      arguments: this process's index in its group, the coordinator's address, the lead's pid.
    """
    index, coordinator, lead = arguments
    end_with(int(lead))
    start = from_line(sys.stdin.readline())
    assert isinstance(start, Start)
    join(int(index), start.config.num_processes, coordinator)
    worker = make_worker(start, Silent(), publish=False)
    for line in sys.stdin:
        if not worker.apply(from_line(line)):
            leave()
            return 0
    return 1  # unreachable while the lead lives


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
