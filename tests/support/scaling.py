"""Bytes that a step of tensor-parallel decoding moves: `python -m tests.support.scaling`.

These are formulas. A test holds them against the collectives of compiled programs at small sizes.
Axes: N devices that share a model, B slots, D drafts, S = D + 1 positions, R = B * S rows, V
vocabulary, K top columns, C chosen ids, H hidden size, L layers.
"""

from dataclasses import dataclass

from ipc import wire

WORD = 4
GROUP = 256  # tokens of a group, see pallas_kernels/backends/xla/group_sums.py
CANDIDATES, MOST_CANDIDATES = 128, 1024  # of a row that is cut, at first and if they are too few
DRAFT_TOKENS = 64  # of the distribution that a draft is drawn from


@dataclass(frozen=True)
class Setup:
    """A model, its requests and the machines. Defaults: Llama 3 70B on H100 nodes."""

    devices: int = 8  # N
    hidden: int = 8192  # H
    layers: int = 80  # L
    vocabulary: int = 128_256  # V
    weights: float = 70.6e9
    item_bytes: int = 2  # bfloat16: weights, hidden states and logits
    slots: int = 64  # B
    drafts: int = 3  # D
    top_k: int = 20  # K
    chosen: int = 0  # C
    memory_bandwidth: float = 3.35e12  # bytes a second and GPU: HBM3 of an H100 SXM
    link_bandwidth: float = 450e9  # bytes a second, GPU and direction: NVLink 4
    latency: float = 10e-6  # seconds of a small collective; assumed

    @property
    def rows(self) -> int:
        return self.slots * (self.drafts + 1)


def all_reduce(num_bytes: float, devices: int) -> float:
    """Bytes that a device sends for a ring all-reduce of `num_bytes`."""
    return 2 * (devices - 1) / devices * num_bytes


def all_gather(num_bytes: float, devices: int) -> float:
    """Bytes that a device sends for a ring all-gather whose result has `num_bytes`."""
    return (devices - 1) / devices * num_bytes


def greedy_bytes(rows: int, drafts: int) -> int:
    """Bytes all-reduced to verify `rows` and to draw `drafts` (B * D) for greedy requests."""
    return WORD * (3 * rows + 2 * drafts)


def logprob_bytes(rows: int, top_k: int, chosen: int, devices: int) -> tuple[int, int]:
    """Bytes all-reduced, and bytes all-gathered, for the logprobs of `rows`."""
    return WORD * rows * (1 + chosen), WORD * devices * rows * (3 + 2 * top_k)


def drafting_bytes(setup: Setup) -> int:
    """Bytes all-gathered to draw all drafts: every shard's candidates, a draft after the other."""
    mine = min(DRAFT_TOKENS, setup.vocabulary // setup.devices)
    return WORD * setup.devices * setup.drafts * setup.slots * 2 * mine


def verification_bytes(setup: Setup) -> tuple[int, int, int]:
    """Bytes all-reduced, all-gathered and permuted, at worst, to verify sampled requests.

    At worst: a row is cut, one needs 1,024 candidates, and one is invalid. The search of rows whose
    cut lies beyond is apart.
    """
    rows, slots, devices = setup.rows, setup.slots, setup.devices
    width = setup.vocabulary // devices
    whole = width % GROUP == 0
    groups = width // GROUP + (not whole)
    tokens = min(DRAFT_TOKENS, setup.vocabulary)
    reduced = rows + slots * setup.drafts * tokens + 2 * rows
    gathered = rows * 2 * (groups + min(CANDIDATES, width) + min(MOST_CANDIDATES, width))
    permuted = 0 if whole else rows * (GROUP - 1) * setup.item_bytes
    return WORD * reduced, WORD * devices * (gathered + 2 * slots), permuted


def sampled_collectives(setup: Setup) -> int:
    """The number of collectives of a sampled step, at worst, where all rows are valid.

    Groups' ends, sums and candidates, named logits, 1,024 candidates, the draw; a draft each.
    """
    whole = (setup.vocabulary // setup.devices) % GROUP == 0
    return 5 - whole + setup.drafts


def this_design(setup: Setup) -> float:
    """Bytes that a device sends for a greedy step with logprobs of every row."""
    reduced, gathered = logprob_bytes(setup.rows, setup.top_k, setup.chosen, setup.devices)
    reduced += greedy_bytes(setup.rows, setup.slots * setup.drafts)
    return all_reduce(reduced, setup.devices) + all_gather(gathered, setup.devices)


def gather_the_logits(setup: Setup) -> float:
    """Bytes that a device sends if every device gets all logits of target and drafts."""
    rows = setup.rows + setup.slots * setup.drafts
    return all_gather(rows * setup.vocabulary * setup.item_bytes, setup.devices)


def model_sums(setup: Setup) -> float:
    """Bytes that a device sends for the model itself: two sums a layer, and one to embed."""
    hidden = setup.rows * setup.hidden * setup.item_bytes
    return all_reduce((2 * setup.layers + 1) * hidden, setup.devices)


def message_bytes(setup: Setup) -> int:
    """Bytes of a step's message if every row was accepted: once over PCIe, then into the ring."""
    positions = setup.drafts + 1
    columns, chosen = [setup.top_k + 1] * setup.slots, [setup.chosen] * setup.slots
    return WORD * int(wire.words_bound([positions] * setup.slots, columns, chosen))


def step_seconds(setup: Setup) -> float:
    """The time to read the weights once: the least that a step takes, and about what it takes."""
    return setup.weights * setup.item_bytes / setup.devices / setup.memory_bandwidth


CLUSTERS = ((8, 8), (64, 8), (64, 64), (1024, 8))  # GPUs, and how many share a model


def table() -> list[str]:
    """The table of docs/scaling.md for greedy requests, in Markdown."""
    lines = [
        "| GPUs | share a model | NVLink, this design | share of step | NVLink, gathered logits | "
        "share of step | PCIe = ring write | host memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for gpus, devices in CLUSTERS:
        setup = Setup(devices=devices)
        groups, step = gpus // devices, step_seconds(setup)
        ours, theirs = this_design(setup), gather_the_logits(setup)
        message = message_bytes(setup)
        seconds = ours / setup.link_bandwidth + 5 * setup.latency
        gathered = theirs / setup.link_bandwidth + 2 * setup.latency
        lines.append(
            f"| {gpus} | {devices} | {ours / 1e3:,.0f} kB | {seconds / step:.1%} | "
            f"{theirs / 1e6:,.1f} MB | {gathered / step:.1%} | "
            f"{message / 1e3:,.1f} kB x {groups} | {2 * message * groups / 1e6:,.2f} MB |"
        )
    return lines


def sampled_table() -> list[str]:
    """The same if every request samples with top-k, top-p and min-p, without the logprobs."""
    lines = [
        "| share a model | NVLink, sent by a GPU | collectives | share of step |",
        "|---|---|---|---|",
    ]
    for devices in (8, 64):
        setup = Setup(devices=devices)
        reduced, gathered, permuted = verification_bytes(setup)
        gathered += drafting_bytes(setup)
        sent = all_reduce(reduced, devices) + all_gather(gathered, devices) + permuted
        count = sampled_collectives(setup)
        share = (sent / setup.link_bandwidth + count * setup.latency) / step_seconds(setup)
        lines.append(f"| {devices} | {sent / 1e3:,.0f} kB | {count} | {share:.1%} |")
    return lines


if __name__ == "__main__":
    print("\n".join([*table(), "", *sampled_table()]))
    own, step = model_sums(Setup()) / 1e9, step_seconds(Setup()) * 1e3
    print(f"\nThe model's own sums: {own:.2f} GB sent by a GPU. A step: {step:.1f} ms.")
