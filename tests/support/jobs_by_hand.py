"""Compilations beside a worker's steps, when a test says so."""

import contextlib


class ByHand:
    """Jobs that wait until a test lets them run, in its own thread, or fail."""

    def __init__(self):
        self.job, self.busy, self.ended, self.started, self.error = None, False, False, 0, None
        self.turns = []  # of `giving_way`

    def start(self, job):
        assert not self.busy
        self.job, self.busy, self.started = job, True, self.started + 1

    def finish(self, error=None):
        if error is None:
            self.job()
        self.error, self.ended = error, True

    def take(self):
        self.busy = self.ended = False
        return self.error

    @contextlib.contextmanager
    def giving_way(self, now):
        self.turns.append(now)
        yield
        self.turns.append("end")


def settle(local):
    """Let jobs run until none is wanted."""
    kinds = local.worker.new_kinds
    while kinds._compiler.busy or kinds.unsettled:
        if kinds._compiler.busy:
            kinds._compiler.finish()
        kinds.settle()
