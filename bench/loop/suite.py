"""The whole decoding loop: the cost of logprobs, and the effect of each part of this project.

Every contender is a `Worker` (bench/loop/rig.py) whose messages go to a consumer in another process
(bench/loop/consumer.py). All decode the same prompts to the same tokens, and contenders that ask
for the same logprobs deliver the same ones: that is checked first. Then they run in turn, round by
round. A round starts from the state after the prompts. First its steps run as in a server, where
step n + 1 is launched before step n is read. Then some steps are taken apart: each part is waited
for, the device is idle meanwhile, and the engine has a core of its own.

There are two latencies, both by the wall clock. "host us", which has a limit, is from the moment
that the device's array exists until the records exist, in the steps taken apart. The first of these
are not counted: in them the ring learns when to expect the next. "busy us" is from sending until
the records exist, as the loop runs; a CPU computes the next step on the same cores meanwhile.

"no logprobs" is the baseline. A name after "K = 20, " says which one part is replaced.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from bench.loop import content
from bench.loop.consumer import QUEUE, Consumer
from bench.loop.rig import FIXED_BYTES, Contender, Rig, Steps
from bench.loop.setups import DRAFTS, REQUESTS, Setup, setups
from bench.timing import Comparison, Target, compare, from_samples, rotated, rounds_of
from ipc.wire import LogprobsMode
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.loop.programs import Compiled, cuts_messages

OFF, K0, K20, ONE = "no logprobs", "K = 0", "K = 20", f"K = 20 for 1 of {REQUESTS}"
HOST_LIMIT = 500.0  # us a step: everything after the device array exists, K = 20
ADDED_LIMITS = {K0: 20.0, K20: 50.0, ONE: 22.0}  # us a step on an H100
BASELINE_LIMIT = 2.0  # times reading the weights

GREEDY = (
    Contender(OFF, None),
    Contender(K0, 0),
    Contender("K = 5", 5),
    Contender(K20, 20),
    Contender("K = 20 and draft logprobs", 20, draft_logprobs=True),
    Contender(ONE, 20, askers=1),
    Contender("K = 20, naive kernel", 20, kernel="naive"),
    Contender("K = 20, fixed-size message", 20, message_bytes=FIXED_BYTES),
    Contender("K = 20, the usual way", 20, kernel="naive", message_bytes=FIXED_BYTES,
              transport=QUEUE, design="objects"),
)  # fmt: skip
NOT_QUICK = ("K = 5", "K = 20 and draft logprobs")
SAMPLED = tuple(
    Contender(name, k, mode=mode, temperature=0.8, top_p=0.95)
    for name, k, mode in (
        (OFF, None, LogprobsMode.RAW),
        ("K = 20, raw", 20, LogprobsMode.RAW),
        ("K = 20, scaled", 20, LogprobsMode.SCALED),
        ("K = 20, processed", 20, LogprobsMode.PROCESSED),
    )
)
# What sampling itself costs: the same loop, whose requests are greedy.
GREEDY_LOOP = Contender("greedy, no logprobs", None)
OF_GREEDY = "% of greedy steps/s"


def run(quick: bool = False) -> list[Comparison]:
    """Measure greedy requests on every setup of this machine, and sampled ones unless `quick`."""
    results = []
    for setup in setups(quick):
        params, model = setup.load()
        config = setup.loop_config(model)
        compiled = Compiled(config, cuts=cuts_messages(config))
        chosen = [c for c in GREEDY if not (quick and c.name in NOT_QUICK)]
        sampled = [*SAMPLED, GREEDY_LOOP]
        groups = {"greedy": chosen} if quick else {"greedy": chosen, "sampled": sampled}
        for kind, contenders in groups.items():
            title = f"decoding {setup.requests} {kind} requests, {DRAFTS} drafts, {setup.name}"
            results.append(measure(title, setup, contenders, params, model, compiled))
    return results


def measure(
    title: str,
    setup: Setup,
    contenders: Sequence[Contender],
    params: Any,
    model: ModelConfig,
    compiled: Compiled | None = None,
) -> Comparison:
    """Measure all contenders on one setup; the first is the baseline.

    Args:
      title: of the comparison.
      setup: the model and the configuration of its loop.
      contenders: which to measure.
      params: the model's weights. model: its configuration.
      compiled: the loop's functions for this setup, to be shared; None: new ones.

    Raises:
      BenchError: a contender delivers other tokens or logprobs.
    """
    config, texts = setup.loop_config(model), setup.prompts(model)
    compiled = compiled or Compiled(config, cuts=cuts_messages(config))
    consumer = Consumer(setup.requests)

    def made() -> dict[str, Rig]:
        return {c.name: Rig(c, config, params, compiled, consumer, texts) for c in contenders}

    try:
        rounds = run_rounds(title, made, setup)
    finally:
        consumer.close()
    found = from_samples(
        title,
        {name: [steps["step"] for steps in found] for name, found in rounds.items()},
        settings={
            "requests": setup.requests,
            "drafts": DRAFTS,
            "vocabulary": model.vocab_size,
            "dtype": model.dtype,
            "parameters": model.num_parameters,
            "steps": setup.steps,
            "rounds": setup.rounds,
            "device": jax.devices()[0].device_kind,
        },
    )
    baseline = rounds[contenders[0].name]
    figures = {name: figures_of(steps, baseline) for name, steps in rounds.items()}
    if GREEDY_LOOP.name in rounds:
        greedy = rounds[GREEDY_LOOP.name]
        for name, steps in rounds.items():
            figures[name][OF_GREEDY], figures[name]["+- % (greedy)"] = share_of(steps, greedy)
    targets = targets_of(found, figures, params, setup) if K20 in figures and setup.apart else ()
    return replace(found, figures=figures, targets=tuple(targets))


def run_rounds(
    title: str, made: Callable[[], dict[str, Rig]], length: Setup
) -> dict[str, list[Steps]]:
    """Check that all results are equal, then run the rounds; each starts with another contender.

    Where a contender's arrays lie in memory is worth a hundredth of its time: `made` makes all of
    them again as often as the setup says.

    Raises:
      BenchError: a contender delivers other tokens, or other logprobs than "K = 20".
    """
    rigs = made()
    names = list(rigs)
    rounds: dict[str, list[Steps]] = {name: [] for name in names}
    seen = {name: rig.run(4, 2, keep=True)[1].content for name, rig in rigs.items()}
    for name, rig in rigs.items():
        one = rig.contender
        if one.temperature == rigs[names[0]].contender.temperature:
            content.check(
                f"{title}: {name}",
                seen[name],
                seen[names[0]],
                [request.params.logprobs for request in rig.requests],
                like=None if one.temperature else seen.get(K20),  # sampled ones: other modes
                drafts=DRAFTS if one.draft_logprobs else 0,
            )
    for index in rounds_of(title, length.rounds):
        if index and index % -(-length.rounds // length.draws) == 0:
            rigs = made()
            for rig in rigs.values():
                rig.run(length.steps, 0)
        for name in rotated(names, index):
            rounds[name].append(rigs[name].run(length.steps, length.apart)[0])
    return rounds


def share_of(rounds: Sequence[Steps], others: Sequence[Steps]) -> tuple[float, float]:
    """The steps a second, in percent of another contender's, and the standard error of that.

    Of the shares in each round: the median of the means of any two, which varies as little as their
    mean and heeds what disturbed some no more than their median (Hodges and Lehmann, Annals of
    Mathematical Statistics 34, 1963). The error is that of a normal distribution with these
    quartiles.
    """
    shares = [100 * base["step"] / mine["step"] for mine, base in zip(rounds, others, strict=True)]
    pairs = itertools.combinations_with_replacement(shares, 2)
    low, _, high = statistics.quantiles(shares)
    error = 0.76 * (high - low) / math.sqrt(len(shares))
    return statistics.median((a + b) / 2 for a, b in pairs), error


def figures_of(rounds: Sequence[Steps], baseline: Sequence[Steps]) -> dict[str, float]:
    """The figures beside the time: in us a step, medians over the rounds."""
    # Differences within a round: drift between rounds cancels.
    added = [mine["step"] - base["step"] for mine, base in zip(rounds, baseline, strict=True)]
    medians = {name: statistics.median(s[name] for s in rounds) for name in rounds[0]}
    del medians["step"], medians["tokens"]
    share, error = share_of(rounds, baseline)
    return {
        "tokens/s": statistics.median(s["tokens"] / s["step"] for s in rounds),
        "% of tokens/s": share,
        "+- %": error,
        "adds us": 1e6 * statistics.median(added),
        **medians,
    }


def targets_of(
    found: Comparison, figures: dict[str, dict[str, float]], params: Any, setup: Setup
) -> list[Target]:
    """The promises: the host's on every machine, the device's on the machine they are made for."""
    here = setup.targets
    reading = found[OFF].median / seconds_to_read(params) if here else None
    host = figures[K20]["host us"]
    return [
        Target("host part, 64 requests at K = 20", HOST_LIMIT, host, "us"),
        Target("H100: baseline step over reading the weights", BASELINE_LIMIT, reading, "x"),
        *[
            Target(
                f"H100: {name} adds to a step",
                most,
                figures[name]["adds us"] if here else None,
                "us",
            )
            for name, most in ADDED_LIMITS.items()
        ],
    ]


def seconds_to_read(params: Any, size: int = 1 << 29) -> float:
    """The time to read the weights at the bandwidth of a copy of `size` bytes, read and written."""
    x = jnp.zeros(size // 2, jnp.bfloat16)
    copy = jax.jit(lambda x: -x)
    timed = compare(
        "copy",
        {"copy": lambda: jax.block_until_ready(copy(x))},
        check=None,
    )
    weights = float(sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
    return weights * timed["copy"].median / (2 * size)
