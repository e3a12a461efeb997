"""Whether the head of a Ray cluster still answers, and is the one that it was. Never jax."""

import threading
import time

from jax_specdec.ray.installed import ray

ASK_SECONDS = 1.0


class Head:
    """Asks the head for its nodes now and then, in a thread that may hang in the question."""

    def __init__(self, timeout: float) -> None:
        """Ask from now on.

        Args:
          timeout: seconds without an answer that are a problem.
        """
        self._timeout = timeout
        self._node: str = ray().get_runtime_context().get_node_id()
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
        """What is wrong; empty where nothing is."""
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

    def _ask(self) -> None:
        while not self._over.wait(ASK_SECONDS):
            try:
                nodes = {node["NodeID"] for node in ray().nodes()}
            except Exception:  # whatever it is, it is no answer
                continue
            if nodes and self._node not in nodes:
                self._changed = (
                    "the head of the Ray cluster was restarted: it does not know this node any "
                    "more. Requests that have not ended are lost; start a new RayEngine"
                )
                return
            self._answered = time.monotonic()
