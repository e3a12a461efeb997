"""Limits of the compilation of a structure."""

from dataclasses import dataclass

_MIB = 1 << 20


class GateFull(Exception):
    """As many structures wait to be compiled as may."""


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of the compilation of a structure.

    Attributes:
      cpu: seconds of a processor.
      mib: MiB of memory, beside the model's tokens.
      seconds: of time, however busy the machine is.
      at_once: structures that are compiled together.
    """

    cpu: int = 2
    mib: int = 96
    seconds: int = 30
    at_once: int = 2

    @property
    def exceeded(self) -> str:
        """The error of a structure that takes more."""
        return (
            f"structured: to compile it takes more than {self.cpu} seconds of a processor or "
            f"{self.mib} MiB: make it smaller"
        )

    def take(self) -> None:
        """Limit this process so from now on."""
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (self.cpu, self.cpu + 1))
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + self.mib * _MIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
