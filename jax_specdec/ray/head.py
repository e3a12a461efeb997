"""Whether the head of a Ray cluster still answers, and is the one that it was."""

import threading
import time
from typing import Any

from jax_specdec.ray.errors import ray

HEAD_ASK_SECONDS = 1.0
# A head that has lost its state is that of another cluster, and refuses who belongs to the old one.
OTHER_CLUSTER = "WrongClusterID"


class HeadWatch:
    """Asks the head whether it lives now and then, in a thread of its own.

    It asks through a client of Ray's that raises. `ray.nodes()`, as any question of Ray's state,
    ends the whole process where a head that was started again has lost its state (Ray 2.60,
    `global_state_accessor.cc`).
    """

    def __init__(self, timeout: float) -> None:
        """Ask from now on.

        Args:
          timeout: seconds without an answer that are a problem.
        """
        self._timeout = timeout
        address = ray().get_runtime_context().gcs_address
        self._client: Any = ray("ray._raylet").GcsClient(address=address)
        self._answered = time.monotonic()
        self._changed = ""
        self._over = threading.Event()
        threading.Thread(target=self._ask, name="head of the cluster", daemon=True).start()

    @property
    def answers(self) -> bool:
        """Whether it answered lately."""
        return not self.problem()

    def close(self) -> None:
        """Ask no more."""
        self._over.set()

    def problem(self) -> str:
        """A sentence on the problem; empty where there is none."""
        if self._changed:
            return self._changed
        silent = time.monotonic() - self._answered
        if silent <= self._timeout:
            return ""
        return (
            f"the head of the Ray cluster has not answered for {silent:.0f} seconds: it is down, "
            "or was restarted. Requests that have not ended are lost; start a new RayEngine once "
            "`ray status` answers (a head with external storage of its state outlives restarts)"
        )

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes, as `ray.nodes()` lists them.

        Raises:
          ConnectionError: the head does not answer, or is not the one that it was; says which.
        """
        if not self._answer():
            raise ConnectionError(self.problem() or "the head of the Ray cluster does not answer")
        nodes: list[dict[str, Any]] = ray().nodes()
        return nodes

    def _ask(self) -> None:
        while not (self._changed or self._over.wait(HEAD_ASK_SECONDS)):
            self._answer()

    def _answer(self) -> bool:
        """Ask once; whether the head that it was has answered."""
        try:
            self._client.check_alive([], timeout=HEAD_ASK_SECONDS)
        except ray("ray.exceptions").RayError as error:
            if OTHER_CLUSTER in str(error):
                self._changed = (
                    "the head of the Ray cluster was restarted: it does not know this node any "
                    "more. Requests that have not ended are lost; start a new RayEngine"
                )
            return False
        self._answered = time.monotonic()
        return True
