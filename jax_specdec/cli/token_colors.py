"""How a terminal shows a token: its color by its logprob, underlined where it was a draft."""

import math

from rich.console import Console
from rich.text import Text

from jax_specdec.records.record import Record
from jax_specdec.text.detokenize import TextStream

# The upper end of each band of logprobs (natural logarithm), and the color of the band.
BANDS = ((-3.0, "red"), (-1.5, "dark_orange"), (-0.5, "yellow"), (-0.1, "chartreuse3"))
SURE = "green"
UNKNOWN = "white"  # no logprobs were asked for
INVALID = "magenta"


def color(logprob: float | None) -> str:
    """The color of a token by its logprob."""
    if logprob is None:
        return UNKNOWN
    if math.isnan(logprob):
        return INVALID
    for upper, name in BANDS:
        if logprob < upper:
            return name
    return SURE


def style(logprob: float | None, accepted: bool) -> str:
    """The style of a token; `accepted` says that it was a draft."""
    return f"{color(logprob)} underline" if accepted else color(logprob)


def legend_text(unknown: bool = True) -> Text:
    """What the colors mean, on one line; `unknown` adds that of tokens without logprobs."""
    text = Text("colors by logprob: ", no_wrap=True, overflow="ellipsis")
    names = [f"below {upper:g}" for upper, _ in BANDS] + ["above"]
    for name, shown in zip(names, [shown for _, shown in BANDS] + [SURE], strict=True):
        text.append(f" {name} ", style=shown)
    if unknown:
        text.append(" not asked ", style=UNKNOWN)
    text.append("  ")
    return text.append("accepted drafts", style="underline")


def legend(console: Console, unknown: bool = True) -> None:
    """Print what the colors mean, if the console has colors."""
    if console.color_system is not None:
        console.print(legend_text(unknown))


def append(text: Text, stream: TextStream, record: Record) -> None:
    """Append a record's tokens to the text, in their styles.

    Control characters are shown as dots: a model may emit some that move the cursor.
    """
    for at, token in enumerate(record.token_ids.tolist()):
        logprob = None if record.logprobs is None else float(record.logprobs[at, 0])
        text.append(harmless(stream.push([token])), style(logprob, at < record.num_accepted))
    if record.finish_reason is not None:
        text.append(harmless(stream.finish()))


def harmless(text: str) -> str:
    """The text with dots for control characters, except for line ends and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
