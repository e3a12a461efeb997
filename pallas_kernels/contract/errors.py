"""Errors between backends and the calls that choose them."""


class DoesNotFit(NotImplementedError):
    """The memory of the chip that a program is lowered for is too small for a kernel."""
