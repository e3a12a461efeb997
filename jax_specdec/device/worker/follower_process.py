"""A follower's process: it computes a model together with its lead, and sends nothing."""

import jax

from jax_specdec.child import Child
from jax_specdec.control import Advance, Phase, Prepare
from jax_specdec.device.worker import compilation_cache, compilations, plugin_messages
from jax_specdec.device.worker.process_group import join, leave_group
from jax_specdec.device.worker.worker_process import make_worker, rehearse


class Silent:
    """The sender of a process that publishes nothing."""

    def send(self, data: object, /) -> None:
        """Refuse a message: two processes would publish the same one."""
        raise RuntimeError("a follower publishes nothing: its lead does")


def main(child: Child) -> int:
    """Entry point: every command that the lead carries out comes from it, `Advance` among them."""
    plugin_messages.shorten()
    start = child.start
    assert start.member is not None
    index, num_devices_here = start.member.index, start.config.devices_here
    join(
        index, start.config.num_processes, start.member.coordinator, local=index % num_devices_here
    )
    compilation_cache.keep_programs(start.config.compilation_cache)
    compilations.watch(child.stats)
    child.stats.enter(Phase.LOADING)
    worker = make_worker(start, Silent(), stats=child.stats, publish=False)
    rehearse(worker, start.config, child.stats)
    child.stats.be_ready(tuple(map(str, jax.local_devices())))
    while True:
        if child.commands.empty():
            child.stats.enter(Phase.IDLE)
        command = child.commands.get()
        if isinstance(command, Advance):
            child.stats.advance()
        if not worker.apply(command):
            leave_group()
            return 0
        if isinstance(command, Prepare):
            child.stats.answer(command.number, worker.next_weights.refusal)
