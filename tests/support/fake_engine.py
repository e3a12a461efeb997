"""An engine that runs no request, for tests of what the command line does around it."""


class FakeEngine:
    """Stands in for the engine: `generate` calls the function of a test, and delivers nothing.

    Attributes:
      configs: with which it was started.
      requests: that it was given.
    """

    status = ()

    def __init__(self, generate=lambda: None):
        self._generate = generate
        self.configs, self.requests = [], []

    def __call__(self, config, *, start_worker=None):
        self.configs.append(config)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def abort(self, request_id, reason):
        raise AssertionError("no request runs")

    def generate(self, requests):
        self.requests += requests
        self._generate()
        return iter(())
