"""Ray for tests without it: its errors, and actors whose methods answer what a test says."""

from types import SimpleNamespace

from jax_specdec.ray import errors


class RayError(Exception):
    """The base of Ray's errors."""


class FakeRay:
    """What `jax_specdec.ray.errors.ray` returns, for every module of Ray's.

    Attributes:
      answers: by method: an error to raise, or what the call returns.
      killed: how often an actor was killed.
    """

    def __init__(self, **answers):
        self.answers, self.killed, self.called = answers, 0, []
        self.RayError = RayError
        for name in errors._LOST:
            setattr(self, name, type(name, (RayError,), {}))
        self.ActorDiedError = type("ActorDiedError", (self.RayActorError,), {})
        self.ActorUnavailableError = type("ActorUnavailableError", (self.RayActorError,), {})
        self.RayTaskError = type("RayTaskError", (RayError,), {})
        self.ObjectStoreFullError = type("ObjectStoreFullError", (RayError,), {})
        self.OutOfDiskError = type("OutOfDiskError", (RayError,), {})

    def __call__(self, name="ray"):
        return self

    def get(self, reference, timeout=None):
        answer = self.answers.get(reference)
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def wait(self, references, timeout, num_returns=1, fetch_local=True):
        return list(references), []

    def kill(self, actor, no_restart):
        self.killed += 1

    def place(self):
        """A replica's place, whose actor's calls are references by the method's name."""

        def bound(method):
            def remote(*arguments):
                self.called.append(method)
                return iter(self.answers["records"]) if method == "records" else method

            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))

        methods = ("address", "begin", "records", "submit", "abort", "status", "close",
                   "load_weights", "use_weights", "forget_weights")  # fmt: skip
        actor = SimpleNamespace(**{method: bound(method) for method in methods})
        return SimpleNamespace(
            actor=actor,
            remove=lambda: self.called.append("remove"),
            remove_leftovers=lambda address: (
                self.called.append("remove_leftovers") or "remove_leftovers"
            ),
        )
