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
        self.answers, self.killed = answers, 0
        self.RayError = RayError
        names = *errors.NAMES_OF_LOSSES, "RayTaskError", "ObjectStoreFullError", "OutOfDiskError"
        for name in names:
            setattr(self, name, type(name, (RayError,), {}))
        for name in ("ActorDiedError", "ActorUnavailableError"):
            setattr(self, name, type(name, (self.RayActorError,), {}))

    def __call__(self, name="ray"):
        return self

    def get(self, reference, timeout=None):
        answer = self.answers.get(reference)
        answer = answer.pop(0) if isinstance(answer, list) else answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def wait(self, references, timeout, num_returns=1, fetch_local=True):
        return list(references), []

    def kill(self, actor, no_restart):
        self.killed += 1

    def place(self):
        """A replica's place, whose actor's calls are references by the method's name."""

        class Actor:
            def __getattr__(_, method):
                def remote(*arguments):
                    return iter(self.answers["records"]) if method == "records" else method

                return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))

        return SimpleNamespace(
            actor=Actor(), remove=lambda: None, remove_leftovers=lambda address: "leftovers"
        )
