"""Where replicas run: placement groups of Ray, and the actors in them."""

import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_specdec.engine.config import EngineConfig
from jax_specdec.ray.config import RayConfig
from jax_specdec.ray.errors import ray
from jax_specdec.ray.group import Follower
from jax_specdec.ray.remove_leftovers import remove_host_leftovers
from jax_specdec.ray.replica import MakeEngine, Replica
from jax_specdec.ray.replica_types import ReplicaAddress

logger = logging.getLogger("jax_specdec.ray")
NAMESPACE = "jax-specdec"
CONNECT_SECONDS = 5.0
# A method's thread: commands keep their order, and nothing waits behind a weights update.
_GROUPS = {"commands": 1, "records": 2, "slow": 4}
# Batches of megabytes come and go. The C library gives their memory back each time, and to get a
# page again takes longer than to fill it.
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "268435456"}


def join_cluster(address: str) -> bool:
    """Join the cluster; whether this program did so only now.

    Raises:
      ConnectionError: nobody listens at the address.
    """
    if ray().is_initialized():
        return False
    check_reachable(address)
    options: dict[str, Any] = {"address": address} if address else {}
    if not (address or os.environ.get("RAY_ADDRESS")):
        options["include_dashboard"] = False
    worker = ray("ray._private.worker")
    # Ray prints what nodes report, hundreds of lines a loss, and has no option for it (2.60).
    worker.print_to_stdstream = functools.partial(_log, worker.print_to_stdstream)
    before = signal.getsignal(signal.SIGTERM)
    ray().init(namespace=NAMESPACE, log_to_driver=False, logging_level="error", **options)
    if threading.current_thread() is threading.main_thread():  # only it may set handlers
        # Ray has put a handler there that calls `sys.exit`, which closes what the system's would
        # not. A program's own is put back. Setting either removes Ray's third one, which writes
        # the stack of the process.
        has_handler = before not in (None, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, before if has_handler else signal.getsignal(signal.SIGTERM))
    return True


def leave_cluster() -> None:
    """Leave the cluster that `start` has joined; one of this machine alone ends."""
    ray().shutdown()
    worker = ray("ray._private.worker")
    worker.print_to_stdstream = worker.print_to_stdstream.args[0]


def _log(_: Callable[..., None], data: Mapping[str, Any], **__: Any) -> None:
    for line in data["lines"]:
        logger.debug("Ray: %s", line)


def check_reachable(address: str) -> None:
    """Refuse an address "host:port" where nobody listens: Ray itself would try for minutes.

    Raises:
      ConnectionError: says why.
    """
    host, sign, port = address.rpartition(":")
    if sign and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(
                f"no Ray cluster listens at {address} ({error}): give the host and port of its "
                "head, as `ray start --head` prints them"
            ) from error


class ReplicaPlace:
    """One replica's placement group and actors."""

    def __init__(
        self,
        number: int,
        name: str,
        config: EngineConfig,
        cluster: RayConfig,
        make_engine: MakeEngine,
    ) -> None:
        """Ask Ray for it; that takes as long as it takes.

        Args:
          number: of the replica.
          name: of the actor, in the namespace "jax-specdec".
        """
        groups = ray("ray.util.placement_group")
        strategies = ray("ray.util.scheduling_strategies")
        strategy = "STRICT_SPREAD" if cluster.nodes > 1 else "PACK"
        bundles = [dict(cluster.devices)] * cluster.nodes
        self.group = groups.placement_group(bundles, strategy=strategy)
        self._environment = {"env_vars": environment(cluster.environment)}
        # Ray counts restarts for a lifetime; the fleet counts those within the window.
        restarts = -1 if config.on_worker_loss == "restart" else 0

        def options(bundle: int) -> dict[str, Any]:
            return {
                **of_actor(cluster.devices),
                "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self.group, placement_group_bundle_index=bundle
                ),
                "max_restarts": restarts,
                "runtime_env": self._environment,
            }

        followers = [
            ray().remote(Follower).options(max_concurrency=256, **options(bundle)).remote()
            for bundle in range(1, cluster.nodes)
        ]
        self.actor = (
            ray()
            .remote(concurrency_groups=_GROUPS)(Replica)
            .options(name=name, namespace=NAMESPACE, **options(0))
            .remote(number, config, make_engine, followers)
        )
        self._followers = followers

    def remove_leftovers(self, address: ReplicaAddress) -> Any:
        """Have what a replica left on its node removed, once its process has ended; a reference."""
        strategies = ray("ray.util.scheduling_strategies")
        options = {
            "num_cpus": 0,
            "max_retries": 0,
            "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(
                address.node, soft=False
            ),
            "runtime_env": self._environment,
        }
        return ray().remote(remove_host_leftovers).options(**options).remote(address.process)

    def remove(self) -> None:
        """End the actors and give their devices back."""
        for actor in (self.actor, *self._followers):
            ray().kill(actor, no_restart=True)
        ray("ray.util.placement_group").remove_placement_group(self.group)


def of_actor(devices: Mapping[str, float]) -> dict[str, Any]:
    """Devices as the options of an actor."""
    others = {name: n for name, n in devices.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": devices.get("CPU", 0),
        "num_gpus": devices.get("GPU", 0),
        "resources": others,
    }


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The variables of a replica's process; this program's PYTHONPATH is among them."""
    variables = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return variables | KEEPS_MEMORY | {**more}


def nodes_of(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The resources of the nodes that live, for an error."""
    texts = []
    for node in nodes:
        if node["Alive"]:
            amounts = sorted(node["Resources"].items())
            parts = [f"{name} {n:g}" for name, n in amounts if ":" not in name]
            texts.append(", ".join(part for part in parts if "memory" not in part) or "none")
    return "; ".join(texts)
