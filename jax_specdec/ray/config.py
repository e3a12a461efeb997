"""The settings of a fleet: how many replicas, on which devices, how batches travel."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax_specdec.engine.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """How engines are spread over a cluster.

    Attributes:
      replicas: engines, each with workers of its own.
      devices: what a replica takes of a node, in Ray's words: {"GPU": 4}, {"TPU": 4}, {"CPU": 8}.
        Its workers share these out.
      nodes: nodes that one replica's model is split over; each gives `devices`. With more than one,
        `EngineConfig.tensor_parallel` counts the devices of all, `processes` is on, and each device
        has a process.
      address: of the cluster's head, "host:port"; empty: the one that RAY_ADDRESS names or this
        node belongs to, else a cluster of this machine alone, which ends with the program. A
        program that has called `ray.init` keeps what it has.
      ahead: requests that a replica may hold beside those in its slots, so that no slot waits for
        this program; None: as many as it has slots. All others wait here, for whoever is free.
      coalesce: seconds between two batches of a replica, at least; three times as many while its
        engine is behind its workers. 0: a batch a step, where the reader is that fast. First tokens
        wait half as long on the average.
      backlog: batches of a replica that may wait to be read; then its engine waits, and its
        workers.
      start_timeout: seconds in which the first replica must take requests.
      head_timeout: seconds in which the cluster's head must answer.
      environment: variables for the replicas' processes, beside those of their nodes.

    Raises:
      ValueError: names a value that is out of range, and the range.
    """

    replicas: int = 1
    devices: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    nodes: int = 1
    address: str = ""
    ahead: int | None = None
    coalesce: float = 0.02
    backlog: int = 4
    start_timeout: float = 600.0
    head_timeout: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = (
            ("replicas", 1, 2**16),
            ("nodes", 1, 2**10),
            ("ahead", 0, 2**20),
            ("coalesce", 0, 60),
            ("backlog", 1, 2**10),
            ("start_timeout", 1, 2**31 - 1),
            ("head_timeout", 1, 2**31 - 1),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} = {value} must be from {low} to {high}")
        for name, amount in self.devices.items():
            if not amount >= 0:
                raise ValueError(f"devices[{name!r}] = {amount} must be 0 or more")
        if not any(self.devices.values()):
            raise ValueError(
                f'devices = {dict(self.devices)} names none: {{"CPU": 1}} is the least'
            )

    def check(self, config: EngineConfig) -> None:
        """Refuse a model that cannot be split over so many nodes.

        Raises:
          ValueError: says which number does not go with which.
        """
        if self.nodes > 1 and (config.num_ranks, config.num_prefill_ranks) != (1, 0):
            raise ValueError(
                f"nodes = {self.nodes} with num_ranks = {config.num_ranks} and num_prefill_ranks = "
                f"{config.num_prefill_ranks}: a replica over several nodes has one worker; raise "
                "replicas instead"
            )
        if config.tensor_parallel % self.nodes or (self.nodes > 1 and not config.processes):
            raise ValueError(
                f"tensor_parallel = {config.tensor_parallel}, processes = {config.processes} with "
                f"nodes = {self.nodes}: the devices of a model must divide among its nodes, and "
                "each must have a process (processes=True)"
            )
