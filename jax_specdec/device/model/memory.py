"""Memory that a model needs against what is free, compared before its weights are read."""

from __future__ import annotations

from pathlib import Path

import jax

GIB = 2**30


class InsufficientMemory(MemoryError):
    """A model needs more memory than there is; the message says how much, and the ways out."""


def check_memory(
    needed: int, what: str, dtype: str, available: int | None = None, num_devices: int = 1
) -> None:
    """Refuse to load a model that does not fit.

    Args:
      needed: bytes of weights and caches.
      what: the model's name in the error.
      dtype: the type that the model computes in.
      available: bytes; None asks the device.
      num_devices: that share the model here; both numbers are of each.

    Raises:
      InsufficientMemory: it does not fit.
    """
    available = available_bytes(num_devices) if available is None else available
    if needed > available:
        way_out = (
            "choose dtype bfloat16 (half of it), fewer slots or a smaller max_length"
            if dtype == "float32"
            else "choose fewer slots, a smaller max_length or a smaller model"
        )
        per_device = f" on each of {num_devices} devices" if num_devices > 1 else ""
        raise InsufficientMemory(
            f"{what} needs {needed / GIB:.2f} GiB{per_device} in {dtype}, with its caches; "
            f"available are {available / GIB:.2f} GiB: {way_out}"
        )


def available_bytes(sharers: int = 1) -> int:
    """Free bytes of this process's first device; where it has no own memory, of the machine.

    Args:
      sharers: devices that share the machine's memory then.
    """
    statistics = jax.local_devices()[0].memory_stats()  # another process may own the first of all
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"] - statistics.get("bytes_in_use", 0))
    return host_bytes() // sharers


def host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: of the machine, or of its control group if less.

    Args:
      root: of the file system; tests name another one.
    """
    fields = dict(
        line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if line
    )
    free = 1024 * int(fields["MemAvailable"].split()[0])
    group = root / "sys/fs/cgroup"
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counted = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # there is no such group, or its limit is "max": none
        return free
    # Cached files count as used, but the kernel drops them when memory is short.
    return max(0, min(free, limit - used + int(counted.get("inactive_file", 0))))
