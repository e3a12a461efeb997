"""The calls of one backend's kernels, without a choice among backends: its `rows` module, by name.

Arguments of the call come in the order of `Rows`; the kernel's own options follow.
"""

from pallas_kernels.backends import answers
from pallas_kernels.contract.rows import Rows


def topk_logprobs(
    kernels, logits, token_ids, outputs, row_ids=None, num_rows=None, temperatures=None,
    extra_token_ids=None, changes=None, *options, **named,
):  # fmt: skip
    """`topk_logprobs` of whole rows."""
    rows = Rows(logits, token_ids, row_ids, num_rows, temperatures, extra_token_ids, changes)
    if changes is None and hasattr(kernels, "topk_logprobs"):
        return kernels.topk_logprobs(rows, outputs, *options, **named)
    return answers.topk_logprobs(_read(kernels, options, named), rows, outputs)


def row_sums(
    kernels, logits, selected, outputs, row_ids=None, num_rows=None, temperatures=None,
    changes=None, *options, **named,
):  # fmt: skip
    """The sums of a part of rows; temperatures are usable ones, changes prepared."""
    rows = Rows(logits, None, row_ids, num_rows, temperatures, None, changes)
    return _read(kernels, options, named)(rows, selected, outputs)


def _read(kernels, options, named):
    return lambda *of_rows: kernels.row_sums(*of_rows, *options, **named)
