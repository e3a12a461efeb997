"""Bytes that a step of tensor-parallel decoding moves: `python -m bench.scaling`.

These are formulas. A test holds them against the collectives of compiled programs at small sizes.
Axes: N devices that share a model, B slots, D drafts, S = D + 1 positions, R = B * S rows, V
vocabulary, K top columns, C chosen ids, H hidden size, L layers.
"""

from dataclasses import dataclass

from ipc import wire

WORD = 4
BITS_PER_TRIP = 4  # of the search among shards, see jax_specdec.device.sampling.threshold_search


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


def num_digits(vocabulary: int) -> int:
    """Words of an exact sum of probabilities: see `jax_specdec.device.sampling.exact_sums`."""
    log = (vocabulary - 1).bit_length()
    return -(-(log + 21) // (31 - max(1, log)))


def search_trips(vocabulary: int, item_bytes: int) -> int:
    """Trips of one search among shards: over the bits of a logit, then over those of an id."""
    bits = 8 * item_bytes, (vocabulary - 1).bit_length()
    return sum(-(-count // BITS_PER_TRIP) for count in bits)


def truncation_words(vocabulary: int, item_bytes: int) -> int:
    """Words all-reduced for a row with top-k, top-p and min-p together, at worst."""
    trips, digits = search_trips(vocabulary, item_bytes), num_digits(vocabulary)
    sums = (1 << BITS_PER_TRIP) - 1
    searches = sum(sums * words * trips + words + 1 for words in (1, digits))
    return 3 + 1 + searches + 3 * digits + 2


def sampled_bytes(setup: Setup) -> int:
    """Bytes all-reduced, at worst, to verify and draw for requests with top-k, top-p and min-p."""
    digits = num_digits(setup.vocabulary)
    cut = truncation_words(setup.vocabulary, setup.item_bytes)
    rows, drafts = setup.rows, setup.slots * setup.drafts
    # A draft's truncation is carried from where the draft was drawn to where it is verified.
    verified = rows * (cut + 1 + digits) + drafts * (6 + digits) + 3 * setup.slots
    drawn = drafts * (cut + 3 + digits)
    return WORD * (verified + drawn)


def sampled_collectives(setup: Setup) -> int:
    """The number of these collectives, about; each waits for the one before."""
    one_cut = 2 * (search_trips(setup.vocabulary, setup.item_bytes) + 2) + 9
    return (1 + setup.drafts) * one_cut


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
    """The same if every request samples with top-k, top-p and min-p."""
    lines = [
        "| share a model | NVLink, all-reduced | sent by a GPU | collectives | share of step |",
        "|---|---|---|---|---|",
    ]
    for devices in (8, 64):
        setup = Setup(devices=devices)
        reduced, count = sampled_bytes(setup), sampled_collectives(setup)
        sent = all_reduce(reduced, devices)
        share = (sent / setup.link_bandwidth + count * setup.latency) / step_seconds(setup)
        lines.append(
            f"| {devices} | {reduced / 1e3:,.0f} kB | {sent / 1e3:,.0f} kB | about {count} | "
            f"{share:.1%} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join([*table(), "", *sampled_table()]))
    own, step = model_sums(Setup()) / 1e9, step_seconds(Setup()) * 1e3
    print(f"\nThe model's own sums: {own:.2f} GB sent by a GPU. A step: {step:.1f} ms.")
