"""The OpenAI-compatible server as an application of Ray Serve.

Ray Serve listens, routes, scales and looks after its replicas; each replica is the server's own
application around an engine of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.ray.errors import ray
from jax_specdec.ray.placement import environment, of_actor
from jax_specdec.ray.remove_leftovers import remove_host_leftovers
from jax_specdec.ray.replica import MakeEngine
from jax_specdec.serve.app import Service
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.model import ServedModel

APPLICATION = "jax-specdec"


class Served:
    """A replica of the application: what Ray Serve asks it, beside requests."""

    app: Any  # Ray Serve's: what `build` has made

    def check_health(self) -> None:
        """Raise where the engine should be started again; Ray Serve does that."""
        health = self.app.state.engine.health()
        if not health.alive:
            raise RuntimeError("; ".join(health.problems))

    def __del__(self) -> None:
        """End the engine; a replica whose application was never made has none."""
        app = getattr(self, "_asgi_app", None)
        if app is not None:
            app.state.engine.close()


def application(
    config: EngineConfig,
    make_model: Callable[[], ServedModel],
    *,
    bounds: Bounds,
    api_key: str = "",
    replicas: int = 1,
    max_replicas: int | None = None,
    scaling: Mapping[str, float] | None = None,
    devices: Mapping[str, float] | None = None,
    variables: Mapping[str, str] | None = None,
    make_engine: MakeEngine = Engine,
) -> Any:
    """An application for `ray.serve.run`.

    Args:
      config: of each replica's engine.
      make_model: makes the names and the tokenizer of the model, in each replica.
      bounds: of each replica.
      api_key: as the server's.
      replicas: how many, at least.
      max_replicas: above it, Ray Serve adds replicas while more requests run in each than it has
        slots; None: never.
      scaling: further settings of Ray Serve's `AutoscalingConfig`, such as `upscale_delay_s`.
      devices: of each replica; None: one CPU.
      variables: environment of the replicas' processes.
    """

    def build() -> Any:
        remove_host_leftovers()
        engine = make_engine(config)
        engine.serve()
        made = Service(engine, make_model(), bounds=bounds, api_key=api_key).app
        made.state.engine = engine
        return made

    serve = ray("ray.serve")
    scale: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        scale = {
            "autoscaling_config": {
                "min_replicas": replicas,
                "max_replicas": max_replicas,
                "target_ongoing_requests": config.num_slots * config.num_ranks,
                **(scaling or {}),
            }
        }
    deployment = serve.deployment(
        name=APPLICATION,
        max_ongoing_requests=bounds.max_open,
        graceful_shutdown_timeout_s=bounds.timeout or 600.0,
        ray_actor_options={
            **of_actor(devices or {"CPU": 1}),
            "runtime_env": {"env_vars": environment(variables or {})},
        },
        **scale,
    )(serve.ingress(build)(Served))
    return deployment.bind()


def deploy(built: Any, host: str, port: int) -> None:
    """Deploy the application, and listen; returns once it answers."""
    serve = ray("ray.serve")
    serve.start(http_options={"host": host, "port": port})
    serve.run(built, name=APPLICATION, route_prefix="/")


def stop() -> None:
    """Take the application back; its requests end first."""
    serve = ray("ray.serve")
    serve.delete(APPLICATION)
