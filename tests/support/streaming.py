"""An engine's streams over scripted workers, served by the test itself, round by round."""

from tests.support.scene import Scene


class StreamingScene(Scene):
    """A scene whose requests are submitted one by one; only `round` serves them.

    Attributes:
      read: the records that were read of each stream, by request id.
      streams: the streams, by request id.
    """

    def __init__(self, **config):
        super().__init__(**config)
        self.open_streams.start = lambda: None
        self.streams, self.read = {}, {}

    def submit(self, request, **how):
        self.streams[request.id] = self.engine.submit(request, **how)
        self.read[request.id] = []
        return self.streams[request.id]

    def take(self, name):
        """Read what a stream has; does not wait."""
        stream = self.streams[name]
        while stream.num_waiting:
            self.read[name].append(next(stream))
        self.records = self.read

    def finish(self):
        """Serve until every stream is over, and read all of them."""
        for _ in range(20_000):
            for name in self.streams:
                self.take(name)
            if not self.open_streams.open_ids:
                return
            self.round()
        raise AssertionError("it does not end")
