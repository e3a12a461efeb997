"""What runs on a cluster, for a person: nodes, replicas, applications."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jax_specdec.ray.errors import lost_errors, ray
from jax_specdec.ray.placement import NAMESPACE, check_reachable, nodes_of
from jax_specdec.ray.replica_types import ReplicaStatus
from jax_specdec.wording import pluralize

PATIENCE_SECONDS = 5.0


def lines(address: str) -> Iterator[str]:
    """Yield a line for each thing that runs; joins the cluster, and leaves it at the end.

    Raises:
      ConnectionError: no cluster answers.
    """
    joined = not ray().is_initialized()
    if joined:
        check_reachable(address)
        ray().init(
            address=address or "auto", namespace=NAMESPACE, log_to_driver=False,
            logging_level="error",
        )  # fmt: skip
    try:
        nodes = ray().nodes()
        alive = [node for node in nodes if node["Alive"]]
        yield f"{pluralize(len(alive), 'node')}: {nodes_of(nodes)}"
        gone = [node["NodeManagerAddress"] for node in nodes if not node["Alive"]]
        if gone:
            yield f"gone: {', '.join(gone)}"
        found = ray("ray.util").list_named_actors(all_namespaces=True)
        names = sorted(one["name"] for one in found if one["namespace"] == NAMESPACE)
        replicas = [name for name in names if ":replica-" in name]
        yield pluralize(len(replicas), "replica")
        for name in replicas:
            yield f"  {name}: {_replica(name)}"
        yield from _applications()
    finally:
        if joined:
            ray().shutdown()


def _replica(name: str) -> str:
    try:
        actor = ray().get_actor(name, namespace=NAMESPACE)
    except ValueError:  # Ray's word for a name that is gone since it was listed
        return "has ended"
    asked = actor.status.options(concurrency_group="slow").remote()
    try:
        return line_of(ray().get(asked, timeout=PATIENCE_SECONDS))
    except lost_errors() as error:  # it starts, is lost, or computes
        return f"does not answer ({type(error).__name__})"


def line_of(status: ReplicaStatus) -> str:
    """A replica's numbers in a line."""
    phases = ", ".join(phase for worker in status.workers for phase in worker.phase)
    restarts = sum(worker.restarts for worker in status.workers)
    return (
        f"{status.host} (pid {status.pid}), {pluralize(status.open_requests, 'request')}, "
        f"{pluralize(status.steps, 'step')}, {pluralize(restarts, 'worker')} lost; "
        f"{phases or 'no engine yet'}"
    )


def _applications() -> Iterator[str]:
    with contextlib.suppress(ModuleNotFoundError):
        serve = ray("ray.serve")
        found: Any = {}
        with contextlib.suppress(serve.exceptions.RayServeException, *lost_errors()):
            found = serve.status().applications  # empty where Ray Serve does not run
        for name, one in found.items():
            yield f"application {name}: {one.status.value}"
            for title, deployment in one.deployments.items():
                states = {str(k): v for k, v in deployment.replica_states.items()}
                yield f"  {title}: {deployment.status.value}, replicas {states}"
