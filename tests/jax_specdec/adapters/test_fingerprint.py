"""Fingerprints of functions: what changes them, what does not, on every Python."""

import pytest

from jax_specdec.adapters.fingerprint import fingerprint

FILES = {
    "__init__": "from .losses import score",
    "names": """
        EPSILON = 1e-5
        SIZES: dict = {'a': 1}
        if SIZES:
            FLAG = True
        else:
            FLAG = 2
    """,
    "maths": "from . import names\nimport peer.late as late\n"
    "def softer(x): return x * names.EPSILON\n"
    "def later(x): return late.last(x)\n"
    "def unused(x): return 3",
    "late": "import peer.maths\ndef last(x): return peer.maths.later(x) if x else 0",
    "losses": """
        # What a loss is made of.
        import functools
        from peer.maths import softer as soft, later
        from .names import SIZES, FLAG
        def twice(f):
            return f
        @functools.partial(twice)
        def score(x: int, *, k: int = 3, **rest) -> float:
            '''The score.'''
            from math import inf
            if (n := k) > 3 and not FLAG:
                return {**rest, None: [*x, -1, 2.5e300, 1j, b'a', ..., x[1:, ::2]]}
            match x:
                case {"a": [1, *_], **other}:
                    raise ValueError(f"{x!r:>{k}}" f"a{{b" 'c' f"{SIZES['a']:x}" "") from None
            return soft(x) + (lambda y, /: later(y))(n) if x is not inf else Sampler.scaled(x)
        class Sampler:
            '''A sampler.'''
            rate: int = 7
            def __init__(self):
                self.other = 6
            @staticmethod
            def scaled(x):
                return x * 8
            def draw(self, x):
                return self.half(x) + self.other
            def half(self, x):
                return x / 2
            def quarter(self, x):
                return x / 4
    """,
}
SCORE, DRAW = "peer.losses:score", "peer.losses:Sampler.draw"
# The same on Python 3.11 to 3.14, whose trees have other fields.
EXPECTED = {SCORE: "ee7d44cb02de1680", DRAW: "b1a36a32c86c7a31"}


def written(folder, **changes):
    """The package with changes, a file's name to what is replaced by what."""
    folder.mkdir()
    for name, text in FILES.items():
        for old, new in changes.get(name, {}).items():
            assert old in text
            text = text.replace(old, new)
        lines = [line[8:] if line.startswith(" " * 8) else line for line in text.split("\n")]
        (folder / f"{name}.py").write_text("\n".join(lines))
    return folder


def test_fingerprints_are_the_same_on_every_python(tmp_path):
    folder = written(tmp_path / "peer")
    assert {name: fingerprint(folder, name) for name in EXPECTED} == EXPECTED


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("losses", "# What a loss is made of.\n", "\n"),
        ("losses", "'''The score.'''\n", "'Of something.' # else\n"),
        ("losses", "x: int, *, k: int = 3, **rest", "x: int,\n *,\n k: int = 0x3, **rest"),
        ("losses", """f"a{{b" 'c' f"{SIZES""", """"a{b" f"c{SIZES"""),
        ("losses", "return x / 4", "return x / 5"),
        ("maths", "return 3", "return 4"),
        ("__init__", "from .losses import score", "from .losses import Sampler"),
    ],
)
def test_layout_words_and_what_is_not_called_change_nothing(file, old, new, tmp_path):
    folder = written(tmp_path / "peer", **{file: {old: new}})
    assert {name: fingerprint(folder, name) for name in EXPECTED} == EXPECTED


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("losses", "k: int = 3", "k: int = 4", {SCORE}),
        ("losses", "2.5e300", "2.5e301", {SCORE}),
        ("losses", "b'a'", "'a'", {SCORE}),
        ("losses", "1j", "1", {SCORE}),
        ("losses", "::2]", ":2]", {SCORE}),
        ("losses", "-1,", "+1,", {SCORE}),
        ("losses", "**other}", "**others}", {SCORE}),
        ("losses", "!r:>{k}", "!s:>{k}", {SCORE}),
        ("losses", "!r:>{k}", "!r:<{k}", {SCORE}),
        ("losses", "a{{b", "a{{c", {SCORE}),
        ("losses", "(lambda y, /:", "(lambda y:", {SCORE}),
        ("losses", "functools.partial(twice)", "functools.partial(twice, *())", {SCORE}),
        ("losses", "return f\n", "return 1\n", {SCORE}),
        ("losses", "from math import inf", "from cmath import inf", {SCORE}),
        ("losses", "import functools", "import other as functools", {SCORE}),
        ("losses", "softer as soft", "unused as soft", {SCORE}),
        ("losses", "rate: int = 7", "rate: int = 9", {SCORE}),
        ("losses", "self.other = 6", "self.other = 9", {SCORE}),
        ("losses", "return x * 8", "return x * 9", {SCORE}),
        ("losses", "return x / 2", "return x / 3", {DRAW}),
        ("losses", "self.half(x) +", "self.quarter(x) +", {DRAW}),
        ("names", "1e-5", "1e-6", {SCORE}),
        ("names", "{'a': 1}", "{'a': 2}", {SCORE}),
        ("names", "FLAG = 2", "FLAG = 3", {SCORE}),
        ("maths", "x * names", "x + names", {SCORE}),
        ("late", "else 0", "else 1", {SCORE}),
    ],
)
def test_what_a_function_says_or_calls_changes_it(file, old, new, changed, tmp_path):
    folder = written(tmp_path / "peer", **{file: {old: new}})
    assert {name for name in EXPECTED if fingerprint(folder, name) != EXPECTED[name]} == changed


@pytest.mark.parametrize(
    "name", ["peer.gone:score", "peer.losses:gone", "peer.losses:Sampler.gone"]
)
def test_what_is_not_there_is_named(name, tmp_path):
    with pytest.raises(LookupError, match=name.replace(":", ".").replace(".", r"\.")):
        fingerprint(written(tmp_path / "peer"), name)


def test_a_module_in_the_syntax_of_another_python_is_told(tmp_path):
    folder = written(tmp_path / "peer", losses={"return f\n": "return f f\n"})
    with pytest.raises(SyntaxError):
        fingerprint(folder, SCORE)
