"""Records as a notebook shows them: what they hold stays text, and colors follow logprobs."""

import html
import math
import re

from jax_specdec.export import TokenTable, colored
from jax_specdec.records.output_processor import step
from tests.support.processor_messages import admitted, target, tokens

HOSTILE = '</span><script>alert(1)</script>"'
SPAN = re.compile(r'<span style="([^"]*)" title="([^"]*)">([^<]*)</span>')


def spans_of(fragment):
    """Each span's style, hint and text."""
    return [[*map(html.unescape, found)] for found in SPAN.findall(fragment)]


def elements_of(fragment):
    return set(re.findall(r"<(\w+)", fragment))


def three(**params):
    """An accepted draft that was likely, another that was not, and an invalid row."""
    slot = tokens(3, 4, 5, columns=2, logprobs=[[-0.01, -0.01], [-7.0, -0.5], [math.nan] * 2],
                  ranks=[1, 9, 0])  # fmt: skip
    slot.topk_ids[:] = [[3], [7], [-1]]
    return step(admitted(logprobs=1, **params), target(0, slot))[1]


def test_tokens_are_colored_by_logprob_and_drafts_underlined():
    records = three()
    likely, unlikely, invalid = spans_of(records._repr_html_())
    assert [span[2] for span in (likely, unlikely, invalid)] == ["3", "4", "5"]
    shade = r"rgba\(234,88,12,([\d.]+)\)"
    assert float(re.search(shade, likely[0])[1]) == 0.0
    assert float(re.search(shade, unlikely[0])[1]) == 0.9
    assert not re.search(shade, invalid[0])
    underlined = ["border-bottom" in span[0] for span in (likely, unlikely, invalid)]
    assert underlined == [True, True, False]
    assert unlikely[1] == "id 4\naccepted draft\nlogprob -7, rank 9\n'7': -0.5"
    assert invalid[1] == "id 5\ninvalid row"
    assert records[0]._repr_html_() == records._repr_html_()


def test_texts_and_ids_are_escaped():
    table = TokenTable([b"a"] * 3 + [HOSTILE.encode(), b" b\n", b"\xe2"] + [b"c"] * 3)
    shown = colored(three(id=HOSTILE), table)._repr_html_()
    assert elements_of(shown) == {"div", "b", "span"}
    assert [span[2] for span in spans_of(shown)] == [HOSTILE, " b\n", r"\xe2"]
    # The check can fail.
    assert "script" in elements_of(shown.replace("&lt;", "<"))
