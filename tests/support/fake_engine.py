"""An engine that runs no request, for tests of what the command line does around it."""


class FakeEngine:
    """Stands in for the engine: `generate` calls the function of a test, and delivers nothing."""

    def __init__(self, generate):
        self._generate = generate

    status = ()

    def __call__(self, config):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, requests):
        self._generate()
        return iter(())
