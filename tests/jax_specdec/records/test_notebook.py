"""Records as a notebook shows them: what they hold stays text, and colors follow logprobs."""

import math
import re
from html.parser import HTMLParser

from jax_specdec.export import TokenTable, colored
from jax_specdec.records.output_processor import step
from tests.support.processor_messages import admitted, target, tokens

HOSTILE = '</span><script>alert(1)</script>"'


class Spans(HTMLParser):
    """The names of all elements, and each span's style, hint and text."""

    def __init__(self, fragment):
        super().__init__()
        self.names, self.spans, self._inside = [], [], False
        self.feed(fragment)

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self._inside = tag == "span"
        if self._inside:
            self.spans.append([dict(attributes).get(name) for name in ("style", "title")] + [""])

    def handle_data(self, data):
        if self._inside:
            self.spans[-1][2] += data

    def handle_endtag(self, tag):
        self._inside = False


def three(**params):
    """An accepted draft that was likely, another that was not, and an invalid row."""
    slot = tokens(3, 4, 5, columns=2, logprobs=[[-0.01, -0.01], [-7.0, -0.5], [math.nan] * 2],
                  ranks=[1, 9, 0])  # fmt: skip
    slot.topk_ids[:] = [[3], [7], [-1]]
    return step(admitted(logprobs=1, **params), target(0, slot))[1]


def test_tokens_are_colored_by_logprob_and_drafts_underlined():
    records = three()
    likely, unlikely, invalid = Spans(records._repr_html_()).spans
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
    found = Spans(shown)
    assert {*found.names} == {"div", "b", "span"}
    assert [span[2] for span in found.spans] == [HOSTILE, " b\n", r"\xe2"]
    # The check can fail.
    assert "script" in Spans(shown.replace("&lt;", "<").replace("&gt;", ">")).names
