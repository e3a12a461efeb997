"""The result of a comparison: medians, spreads, ratios, and limits that were held or missed."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Contenders of every suite that are another way than this project's; all others are its own.
PEERS = frozenset({
    "log_softmax + top_k", "log_softmax + top_k, unstable", "torch eager", "torch compiled",
    "max only", "copy", "logsumexp + top_k", "plain JAX sampler", "topk_logprobs, K = 20",
    "numpy argpartition", "SysV fixed struct", "ZeroMQ msgpack", "ZeroMQ copy=False",
    "ZeroMQ raw bytes", "multiprocessing.Pipe", "multiprocessing.Queue", "iceoryx2, spin",
    "C, spin + 2 memcpy", "lists a token", "objects in dicts", "msgpack, decoding alone",
    "pickle, decoding alone", "no logprobs", "K = 20, naive kernel",
    "K = 20, fixed-size message", "K = 20, multiprocessing.Queue", "K = 20, ZeroMQ",
    "K = 20, lists a token", "K = 20, objects in dicts", "K = 20, the usual way",
    "tokenizers, decode_batch", "tokenizers, decode each", "numpy", "numpy and jax",
    "tunix", "MaxText", "sglang-jax", "tpu-inference",
})  # fmt: skip
MEMORY, HOST = "MB of temporaries and results", "KB to the host"  # names of figures
PERCENTILES = 50, 99


@dataclass(frozen=True)
class Timing:
    """One contender's seconds a call: the median of the rounds, and their quartiles."""

    name: str
    median: float
    low: float
    high: float
    ratio: float  # this median over the baseline's; above 1 is slower
    rounds: tuple[float, ...]
    percentiles: Mapping[str, float] = field(default_factory=dict)  # seconds of single events


@dataclass(frozen=True)
class Target:
    """A promised limit and its measurement."""

    what: str
    limit: float
    measured: float | None  # None: not measured on this machine
    unit: str
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """ "held", "MISSED" or "not measured"."""
        if self.measured is None:
            return "not measured"
        held = self.measured >= self.limit if self.at_least else self.measured <= self.limit
        return "held" if held else "MISSED"

    def __str__(self) -> str:
        limit = f"at {'least' if self.at_least else 'most'} {self.limit:.3g} {self.unit}"
        found = "" if self.measured is None else f"{self.measured:.3g} {self.unit}, "
        return f"{self.what}: {found}{self.verdict} ({limit})"


@dataclass(frozen=True)
class Comparison:
    """The result of one run of contenders; the first is the baseline of the ratios."""

    title: str
    settings: Mapping[str, Any]
    timings: tuple[Timing, ...]
    notes: Mapping[str, Any] = field(default_factory=dict)
    suite: str = ""
    # By contender, then by the name of what was counted: "bytes", "blocks", ...
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()

    def __getitem__(self, name: str) -> Timing:
        return next(timing for timing in self.timings if timing.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        """The contenders, in the order of the table."""
        return tuple(timing.name for timing in self.timings)

    def speedup(self, name: str, over: str) -> float:
        """How many times faster `name` is than `over`, by medians."""
        return self[over].median / self[name].median


def from_samples(
    title: str,
    samples: Mapping[str, Sequence[float]],
    *,
    settings: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
    events: Mapping[str, Sequence[float]] | None = None,
) -> Comparison:
    """A comparison of times that were measured elsewhere: between processes, or on a device.

    Args:
      title: what is compared.
      samples: contender to the seconds of its rounds; the first contender is the baseline.
      settings: what was measured.
      notes: remarks for the reader of the table.
      events: contender to the seconds of single events (messages), for their percentiles.
    """
    base = statistics.median(next(iter(samples.values())))
    timings = []
    for name, values in samples.items():
        median = statistics.median(values)
        low, high = map(float, np.percentile(values, (25, 75), method="nearest"))
        single = (events or {}).get(name, ())
        each = np.percentile(single, PERCENTILES, method="nearest").tolist() if single else ()
        found = {f"p{p}": seconds for p, seconds in zip(PERCENTILES, each, strict=False)}
        timings.append(Timing(name, median, low, high, median / base, tuple(values), found))
    return Comparison(title, dict(settings or {}), tuple(timings), dict(notes or {}))
