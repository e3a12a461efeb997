"""One replica as the fleet sees it: begun, read, lost, begun again; a thread of its own.

Ray starts a lost actor again; this thread notices the loss, has its requests taken back, and begins
the new one.
"""

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax_specdec.engine.errors import WeightsError, WorkerFailed
from jax_specdec.ray.batch import unpacked
from jax_specdec.ray.config import RayConfig
from jax_specdec.ray.errors import CANNOT_BEGIN, NotBegun, full_store, lost_errors, ray
from jax_specdec.ray.placement import ReplicaPlace
from jax_specdec.ray.replica_types import ReplicaAddress, ReplicaStatus, Submission, Weights
from jax_specdec.ray.request_table import BatchError
from jax_specdec.wording import pluralize

logger = logging.getLogger("jax_specdec.ray")
REPLICA_ANSWER_SECONDS = 5.0  # for a replica that is asked for its numbers, or told to close
# Between two looks whether the fleet is over: a thread that waits in Ray after `ray.shutdown` ends
# the process, without a word.
REPLICA_LOOK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class FleetCalls:
    """Calls of a member, from its thread.

    Attributes:
      over: whether no member shall go on.
      weights: those in use.
      joined: it has begun, with weights of a version; False where it must get others.
      brought: takes a batch; waits where its reader is behind, and raises BatchError.
      lost: notes a loss: why, whether Ray could start it again, and whether the loss is a new one.
        Then `coming` says whether it comes again.
      failed: ends the fleet with an error.
    """

    over: Callable[[], bool]
    weights: Callable[[], Weights]
    joined: Callable[["ReplicaHandle", int], bool]
    brought: Callable[["ReplicaHandle", Any], None]
    lost: Callable[["ReplicaHandle", str, bool, bool], None]
    failed: Callable[[BaseException], None]


class ReplicaHandle:
    """A replica of a fleet.

    Attributes:
      number: its place among the replicas.
      ready: it takes requests.
      begun: it did so at least once.
      coming: it does, or will once Ray has started it.
      problem: why it does not, as far as is known.
      traffic: what came from it, and `calls` that were made to it.
    """

    def __init__(
        self, number: int, place: Callable[[], ReplicaPlace], fleet: FleetCalls, cluster: RayConfig
    ) -> None:
        self.number = number
        self.ready = self.begun = False
        self.coming = True
        self.problem = ""
        self.traffic = dict.fromkeys(("batches", "bytes", "rows", "tokens", "calls"), 0)
        self._make_place, self.fleet = place, fleet
        self._cluster = cluster
        self._place: ReplicaPlace | None = None
        self._address: ReplicaAddress | None = None  # where it has to be closed, or tidied up after
        self._losses = 0
        self._answered = False  # it has, since the last loss: what Ray says twice counts once
        self._ended = -1  # losses when the watch ended it: once is enough
        # Calls whose outcome is not known, and losses when they were made: any thread adds some,
        # the fleet's watch takes them out.
        self._sent: collections.deque[tuple[Any, int]] = collections.deque()
        self._thread = threading.Thread(target=self.run, name=f"replica {number}", daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._place = self._make_place()
        self._thread.start()

    def close(self, *, reachable: bool) -> None:
        """End the replica; without a head that can be reached, Ray ends it with this program."""
        with contextlib.ExitStack() as closing:  # all of it is done, and then an error raised
            if self._thread.ident is not None:
                closing.callback(self._thread.join, REPLICA_ANSWER_SECONDS)
            if self._place is not None and reachable:
                closing.callback(self._remove_leftovers)
                closing.enter_context(contextlib.suppress(*lost_errors()))
                closing.callback(self._place.remove)
                closing.enter_context(contextlib.suppress(*lost_errors()))
                ray().get(self.call("close", "slow"), timeout=REPLICA_ANSWER_SECONDS)
                self._address = None

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Send requests; does not wait.

        Raises:
          ClusterError: they are large, and the object store is full.
        """
        errors = ray("ray.exceptions")
        try:
            call = self.call("submit", "commands", submissions)
        except (errors.ObjectStoreFullError, errors.OutOfDiskError) as error:
            raise full_store(f"{pluralize(len(submissions), 'request')}", error) from error
        self._sent.append((call, self._losses))

    def abort(self, names: Sequence[str]) -> None:
        """End requests; does not wait."""
        self.call("abort", "commands", names)

    def look(self) -> None:
        """Find requests that did not arrive: then the replica is not to be relied on.

        Calls of before its last loss say nothing of the one that has begun since.
        """
        sent = dict(self._sent.popleft() for _ in range(len(self._sent)))
        if sent:
            done, pending = ray().wait([*sent], num_returns=len(sent), timeout=0)
            self._sent += ((call, sent[call]) for call in pending)
            for call in done:
                try:
                    ray().get(call)
                except NotBegun:  # the reader of its batches finds it lost
                    continue
                except lost_errors() as error:
                    if self._ended < sent[call] == self._losses and self.ready:
                        self._ended = self._losses
                        self.kill(_first(error))

    def status(self) -> ReplicaStatus:
        """Its numbers."""
        state = "ready" if self.ready else "starting" if self.coming else "gone"
        about: dict[str, Any] = {"state": state, "losses": self._losses, "problem": self.problem}
        if self.ready:
            with contextlib.suppress(*lost_errors()):
                call = self.call("status", "slow")
                status: ReplicaStatus = ray().get(call, timeout=REPLICA_ANSWER_SECONDS)
                return replace(status, **about)
        return replace(ReplicaStatus(replica=self.number), **about)

    def load_weights(self, weights: Weights, timeout: float | None) -> Callable[[], str]:
        """Have weights loaded; returns a function that waits for the refusal, or ""."""
        call = self.call("load_weights", "slow", weights, timeout)

        def answer() -> str:
            try:
                version: str = self.get(call)
            except lost_errors() as error:
                return f"it was lost before all had loaded the weights: {_first(error)}"
            return version

        return answer

    def use_weights(self) -> Callable[[], int]:
        """Have the loaded weights used; returns a function that waits for their version, or -1."""
        call = self.call("use_weights", "slow")
        lost_or_failed: tuple[type[Exception], ...] = (*lost_errors(), WeightsError, WorkerFailed)

        def answer() -> int:
            try:
                version: int = self.get(call)
            except lost_or_failed:
                return -1
            return version

        return answer

    def forget_weights(self) -> None:
        """Have loaded weights forgotten."""
        with contextlib.suppress(*lost_errors()):
            ray().get(self.call("forget_weights", "slow"), timeout=REPLICA_ANSWER_SECONDS)

    def kill(self, why: str, *, for_good: bool = False) -> None:
        """End the actor; Ray starts it again where it may, and not `for_good`."""
        logger.warning("replica %d is ended: %s", self.number, why)
        assert self._place is not None
        with contextlib.suppress(*lost_errors()):
            ray().kill(self._place.actor, no_restart=for_good)

    def call(self, method: str, group: str, *arguments: Any, **options: Any) -> Any:
        assert self._place is not None
        self.traffic["calls"] += 1
        bound = getattr(self._place.actor, method)
        return bound.options(concurrency_group=group, **options).remote(*arguments)

    def run(self) -> None:
        """Live; once the fleet is over, Ray may be gone under this thread."""
        try:
            self._live()
        except Exception as error:  # any: a thread has no caller, so the fleet's readers get it
            if not self.fleet.over():
                logger.exception("the fleet ends: a mistake at replica %d", self.number)
                self.fleet.failed(error)

    def _live(self) -> None:
        """Begin and read, again and again, until the fleet is over or Ray gives up."""
        errors = ray("ray.exceptions")
        cannot_begin: tuple[type[Exception], ...] = (*lost_errors(), *CANNOT_BEGIN)
        while not self.fleet.over():
            try:
                self._begin()
            except errors.ActorDiedError as error:
                self.lose(self.problem or _first(error), coming=False)
                return
            except errors.ActorUnavailableError as error:  # lost while it began: it comes again
                if not self.lose(_first(error), coming=True):
                    return
                continue
            except cannot_begin as error:
                self.problem = _first(error)
                if not self.lose(self.problem, coming=True):
                    return
                self._restart()
                continue
            why = self._read()
            if self.fleet.over():
                return
            if not self.lose(why, coming=True):
                return

    def _begin(self) -> None:
        """Wait until the replica takes requests, with the weights in use."""
        while not self.fleet.over():
            weights = self.fleet.weights()
            # The first question waits until Ray has started it; who answered is begun, or lost.
            self._address = self.get(self.call("address", "slow", max_task_retries=-1))
            self._answered = True
            self.get(self.call("begin", "slow", weights))
            self.problem = ""
            if self.fleet.joined(self, weights.version):
                self.begun = True
                return

    def _read(self) -> str:
        """Take batches until there are no more; why."""
        cluster = self._cluster
        batches = self.call(
            "records",
            "records",
            cluster.coalesce,
            num_returns="streaming",
            _generator_backpressure_num_objects=cluster.backlog,
        )
        errors = ray("ray.exceptions")
        try:
            for data in self.stream_values(batches):
                if isinstance(data, str):
                    self._restart()
                    return data
                rows = unpacked(data)
                self.traffic["batches"] += 1
                self.traffic["bytes"] += data.nbytes
                self.traffic["rows"] += rows.num_rows
                self.traffic["tokens"] += len(rows.column("token_id").values)
                self.fleet.brought(self, rows)
            return "its batches have ended"
        except BatchError as error:
            self._restart()
            return str(error)
        except (errors.ObjectStoreFullError, errors.OutOfDiskError) as error:
            self.fleet.failed(full_store(f"a batch of replica {self.number}", error))
            return str(error)
        except lost_errors() as error:
            return _first(error)

    def stream_values(self, references: Any) -> Iterator[Any]:
        """Yield what a generator of Ray's brings, until it has ended or the fleet is over."""
        while not self.fleet.over():
            done, _ = ray().wait([references], timeout=REPLICA_LOOK_SECONDS, fetch_local=False)
            if done:
                try:
                    reference = next(references)
                except StopIteration:
                    return
                data = self.get(reference)
                del reference
                yield data
                del data

    def get(self, reference: Any) -> Any:
        """The object of a reference.

        Raises:
          GetTimeoutError: the fleet is over.
          lost_errors(): an actor, a node or an object is gone.
          Exception: what the replica's code raised.
        """
        late = ray("ray.exceptions").GetTimeoutError
        while True:
            try:
                return ray().get(reference, timeout=REPLICA_LOOK_SECONDS)
            except late:
                if self.fleet.over():
                    raise

    def _restart(self) -> None:
        """Have Ray start the actor again, where it may: its engine has ended, or is not trusted."""
        if not self.fleet.over():
            self.kill("its engine has ended")

    def lose(self, why: str, *, coming: bool) -> bool:
        """Report a loss; whether the replica comes again. If not, its actor is ended for good."""
        self.problem = why
        answered, self._answered = self._answered, False
        self.fleet.lost(self, why, coming, answered)
        self._losses += 1  # who sees it sees that the replica is not ready
        if not self.coming:  # also where that ends the fleet: it may stay open for hours
            self.kill(why, for_good=True)
            self._remove_leftovers()
        time.sleep(0.05)
        return self.coming

    def _remove_leftovers(self) -> None:
        """Remove what the replica left on its node, where it did not close and begins no more."""
        address, self._address = self._address, None
        if address is not None and self._place is not None:
            with contextlib.suppress(*lost_errors()):  # the node is gone
                ray().get(self._place.remove_leftovers(address), timeout=REPLICA_ANSWER_SECONDS)


def _first(error: BaseException) -> str:
    """An error of Ray's in a line: its cause, where it has one."""
    text = str(getattr(error, "cause", None) or error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] if lines else type(error).__name__
