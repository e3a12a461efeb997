"""One number a row, to be executed as PTX: its logprobs have the same bits by every way to them.

A row's raw and scaled logprobs, log-sum-exp, entropy and top K, by `topk_logprobs` whatever K, the
place, other rows, programs of a row, one launch or two; by the read of `verify` and what follows
it; and of columns that several shards have.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends import answers
from pallas_kernels.backends.answers import usable_temperatures
from pallas_kernels.backends.groups import Needed, RowPart, inverse_temperature
from pallas_kernels.backends.mosaic_gpu import cluster_kernel, groups_kernel, thread
from pallas_kernels.backends.mosaic_gpu import groups as sampled
from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.schedule import GROUP, NARROW, Schedule
from pallas_kernels.backends.row_totals import PartSums, inverse_of, joined
from pallas_kernels.backends.xla.tails import FOLLOWING, tail_of
from pallas_kernels.contract.changes import Changes, apply, of_shard, prepared
from pallas_kernels.contract.rows import Outputs, Rows
from pallas_kernels.meshes.placement import WHOLE
from pallas_kernels.sampling import row_read
from pallas_kernels.sampling.parameters import Sampling
from tests.pallas_kernels.mosaic_gpu.ptx.cases import Case, edge_rows
from tests.support import kernel_calls
from tests.support.changed_logits import as_changes, changes_of

K = 5
TEMPERATURES = np.float32([1, 0.7, 0, 0.013, 30, 1, 0.7, 1.3])
ALL = {"entropy": True, "log_sum_exp": True, "top_logits": True}
Numbers = dict[str, np.ndarray]


def bits(x: Any) -> np.ndarray:
    """Of float32, with one NaN."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.int32)


def numbers_of(results: Any, order: np.ndarray | None = None) -> Numbers:
    """What calls are compared by, in the order of the rows: the first K columns at most."""
    found = {"logprobs": bits(results.logprobs[:, : K + 1])}
    for name in ("log_sum_exp", "entropy"):
        if (values := getattr(results, name)) is not None:
            found[name] = bits(values)
    found["ids"] = np.asarray(results.token_ids[:, : K + 1])
    if order is None:
        return found
    back = np.argsort(order)
    return {name: x[back] for name, x in found.items()}


class Sample:
    """Rows of edges, a token and a temperature of each, and their changes."""

    def __init__(self, vocabulary: int, dtype: str, names: tuple[str, ...] = ()) -> None:
        """names: of the changes; the vocabulary is more than a block."""
        self.x = edge_rows(Schedule(vocabulary, dtype, GROUP, 1))[[0, 1, 2, 7, 8, 11, 13, 17]]
        self.count, self.vocabulary = self.x.shape
        rng = np.random.default_rng(vocabulary)
        self.ids = rng.integers(0, vocabulary, self.count, np.int32)
        self.given = changes_of(rng, self.count, vocabulary, names)
        self.changes = as_changes(self.given) if names else None

    def topk(
        self, k: int, programs: int, order: np.ndarray | None = None, **results: bool
    ) -> Numbers:
        """By `topk_logprobs`, of rows in this order, each read by so many programs."""
        places = np.arange(self.count) if order is None else order
        cut = Schedule(self.vocabulary, self.x.dtype.name, NARROW if k > 32 else GROUP, 1)
        cut = replace(cut, splits=programs - len(cut.edges))
        changes = None
        if self.changes is not None:
            changes = jax.tree.map(lambda x: x[places], self.changes)
        out = kernel_calls.topk_logprobs(
            run, jnp.asarray(self.x), jnp.asarray(self.ids[places]), Outputs(k, **results),
            jnp.asarray(places, jnp.int32), None, jnp.asarray(TEMPERATURES[places]),
            jnp.zeros((self.count, 0), jnp.int32), changes, schedule=cut,
        )  # fmt: skip
        return numbers_of(out, places)

    def verified(self) -> Numbers:
        """By the read that `verify` has, and the logprobs of emitted tokens from it."""
        logits, sampling = jnp.asarray(self.x), Sampling.of(self.count, temperature=TEMPERATURES)
        inverse = inverse_temperature(sampling.temperature)
        changes = prepared(self.changes, self.vocabulary)
        part = RowPart(logits, tail_of(logits, changes), jnp.int32(0))
        needed = Needed.all_of(jnp.zeros(self.count, jnp.int32))
        first, *others = sampled.read_part(part, K, inverse, needed, changes)
        if others:
            first = first._replace(raw_sums=first.raw_sums[:, :0])
        summary = row_read._of_read(first, inverse, K, self.vocabulary)
        read = row_read.for_logprobs(summary, sampling, K, (self.count, 1))
        given = {
            name: x[:, None] for name, x in (self.changes or Changes())._asdict().items()
            if x is not None
        }  # fmt: skip
        out = row_read.logprobs_of_read(
            logits[:, None], jnp.asarray(self.ids)[:, None], read,
            scaled=jnp.ones(self.count, bool), **given,
        )  # fmt: skip
        return numbers_of(out)

    def sharded(self, shards: int) -> Numbers:
        """By the sums of the columns of so many shards."""
        width = -(-self.vocabulary // shards)
        padded = np.full((self.count, shards * width), -np.inf, self.x.dtype)
        padded[:, : self.vocabulary] = self.x
        t = usable_temperatures(jnp.asarray(TEMPERATURES))
        changes = of_shard(prepared(self.changes, self.vocabulary), jnp.int32(0), shards * width)
        whole = Rows(jnp.asarray(padded), jnp.asarray(self.ids), changes=changes)
        named = answers.named_changed(whole, jnp.asarray(self.ids)[:, None], WHOLE)
        copy = np.asarray(apply(whole.logits, changes))
        parts = []
        for first in range(0, shards * width, width):
            here = of_shard(changes, jnp.int32(first), width)
            rows = Rows(jnp.asarray(padded[:, first : first + width]), temperatures=t, changes=here)
            behind = copy[:, first + width : first + width + FOLLOWING]
            missing = ((0, 0), (0, FOLLOWING - behind.shape[1]))
            behind = np.pad(behind, missing, constant_values=-np.inf)
            following = jnp.asarray(behind) if width % GROUP else None
            offset = jnp.int32(-first % GROUP)
            wanted = Outputs(K, entropy=True)
            part = run.part_sums(rows, following, offset, named[:, 0], wanted)
            parts.append(part._replace(top_ids=part.top_ids + first))
        return self._joined(parts, t, named)

    def _joined(self, parts: list[PartSums], t: jax.Array, named: jax.Array) -> Numbers:
        def beside(*arrays: jax.Array) -> jax.Array:
            return jnp.concatenate(arrays, axis=1)

        groups = jax.tree.map(beside, *(part.groups for part in parts))
        first, *others = parts
        more = beside(*(x.top_ids for x in others)), beside(*(x.top_logits for x in others))
        top = answers.in_order(first.top_ids, first.top_logits, *more, K)
        larger = functools.reduce(jnp.add, (part.num_larger for part in parts))
        part = PartSums(groups, larger, *top)
        sums = joined(part, inverse_of(t, self.count), K, self.vocabulary)
        outputs, active = Outputs(K, log_sum_exp=True, entropy=True), jnp.ones(self.count, bool)
        ids = jnp.asarray(self.ids)
        return numbers_of(answers.answers(outputs, self.vocabulary, sums, ids, named, active, t))


def same_bits(name: str, sample: Callable[[], Sample], programs: tuple[int, ...]) -> Case:
    """The bits of a row by every way; `programs` of a row: the first ones in one launch and two."""
    made = sample()
    schedule = Schedule(made.vocabulary, made.x.dtype.name, GROUP, 1)

    def call() -> Any:
        found = [made.topk(K, programs[0], **ALL)]
        found += [made.topk(K, number, entropy=True) for number in programs[1:]]
        with mock.patch.object(cluster_kernel, "fits_cluster", return_value=False):
            found.append(made.topk(K, programs[0], **ALL))
        found += [made.topk(k, programs[-1]) for k in (0, 20, 40)]
        found.append(made.topk(K, programs[0], np.arange(made.count)[::-1], log_sum_exp=True))
        found += [made.sharded(2), made.sharded(3), made.verified()]
        return found

    def check(found: list[Numbers]) -> None:
        first, *others = found
        valid = [row for row in range(made.count) if first["ids"][row, 1] >= 0]
        assert len(valid) > made.count // 2
        for number, other in enumerate(others):
            compare(first, other, f"way {number + 1}")

    return Case(name, schedule, K, made.count, call, check)


def compare(first: Numbers, other: Numbers, way: str) -> None:
    """Raises AssertionError where one has other bits than the other, of what both have."""
    for name in first.keys() & other.keys():
        width = min(first[name].shape[-1], other[name].shape[-1])
        a, b = (x[name][..., :width] for x in (first, other))
        np.testing.assert_array_equal(a, b, err_msg=f"{way}: {name}")


def other_order(name: str) -> Case:
    """Negative control: a group's terms are added in another order, and the comparison says so."""
    made = Sample(4100, "float32")
    made.x = np.random.default_rng(0).normal(size=made.x.shape).astype(np.float32)
    # Sums of about 1.5: of larger ones the logarithm would have fewer bits.
    made.x[:, 7] = np.log(np.exp(made.x).sum(axis=1)) + 0.7
    schedule = Schedule(made.vocabulary, made.x.dtype.name, GROUP, 1)
    in_pairs = thread.sum_in_pairs

    def backward(values: Any) -> Any:
        """The first of eight is added last."""
        if len(values) < 8:
            return in_pairs(values)
        return in_pairs([in_pairs([*values[1:5]]), in_pairs([in_pairs([*values[5:7]]),
                         in_pairs([values[7], values[0]])])])  # fmt: skip

    def call() -> Any:
        found = [made.topk(2, 2, entropy=True)]
        with mock.patch.object(groups_kernel.thread, "sum_in_pairs", backward):
            found.append(made.topk(3, 2, log_sum_exp=True))
        return found

    def check(found: list[Numbers]) -> None:
        with pytest.raises(AssertionError, match="logprobs"):
            compare(*found, "another order")

    return Case(name, schedule, 3, made.count, call, check)


def bits_cases() -> list[Callable[[], Case]]:
    """Functions that make the cases, one by one."""
    bf16, f16, f32 = "bfloat16", "float16", "float32"
    return [
        lambda: same_bits("bits", lambda: Sample(12_544, bf16), (3, 4, 2)),
        lambda: same_bits("bits, odd", lambda: Sample(9001, f32), (3, 2)),
        lambda: same_bits("bits, mask", lambda: Sample(8450, bf16, ("allowed",)), (3, 2)),
        lambda: same_bits("bits, bias", lambda: Sample(8452, f16, ("allowed", "bias")), (3, 2)),
        lambda: other_order("bits, another order"),
    ]
