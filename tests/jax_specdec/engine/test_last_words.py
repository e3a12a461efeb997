"""The line that says why a process ended, of what Python, JAX and libraries print at an end."""

import pytest

from jax_specdec.engine.last_words import reason_line
from tests.support.processes import ended


def printed_by(code):
    done = ended("-c", code)
    return done.stderr, done.returncode


BOOM = "ValueError: boom at 7"
ENDS = {
    "plain": ("raise ValueError('boom at 7')", BOOM),
    "a message of many lines": (r"raise ValueError('boom at 7\nsecond\n  third\n\nlast')", BOOM),
    "notes": ("e = ValueError('boom at 7'); e.add_note('see\\nhere'); raise e", BOOM),
    "raised from another": (
        "try: 1 / 0\nexcept ZeroDivisionError as e: raise ValueError('boom at 7') from e", BOOM),
    "raised while another was handled": (
        "try: 1 / 0\nexcept ZeroDivisionError: raise ValueError('boom at 7')", BOOM),
    "no message": ("raise ValueError", "ValueError"),
    "a message that begins with an empty line": (r"raise ValueError('\n\nboom at 7')", BOOM),
    "a message that quotes a traceback": (
        "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: said = traceback.format_exc()\n"
        "e = ValueError('boom at 7 of callback: ' + said); e.__suppress_context__ = True\nraise e",
        BOOM + " of callback: Traceback (most recent call last): ZeroDivisionError: division by "
        "zero"),
    "a group": ("raise ExceptionGroup('boom at 7', [ValueError('a'), TypeError('b')])",
        "ExceptionGroup: boom at 7 (2 sub-exceptions)"),
    "a syntax error": ("compile('a b', 'x.py', 'exec')", "SyntaxError: invalid syntax"),
    "deep frames": (
        "def f(n):\n    if n: f(n - 1)\n    raise ValueError('boom at 7')\nf(400)", BOOM),
    "an exception in a thread before": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\n"
        "raise ValueError('boom at 7')", BOOM),
    "an exception that is ignored behind": (
        "class A:\n    def __del__(self): raise TypeError('late')\na = A()\n"
        "raise ValueError('boom at 7')", BOOM),
    "of a class in a module": ("import json; json.loads('[')",
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 2 (char 1)"),
    "words behind": (
        "import atexit, sys\natexit.register(lambda: print('bye', file=sys.stderr))\n"
        "raise ValueError('boom at 7')", BOOM),
    "no traceback": ("import sys; sys.exit('not this file: x')", "not this file: x"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDS)
def test_reason_is_the_line_of_the_exception(kind):
    code, line = ENDS[kind]
    printed, status = printed_by(code)
    assert status == 1
    assert reason_line(printed) == line


def test_notes_of_jax_are_no_reason():
    """Its own tracebacks, in each way of filtering them."""
    code = (
        "import jax, sys\njax.config.update('jax_traceback_filtering', sys.argv[1])\n"
        "jax.jit(lambda x: jax.numpy.reshape(x, (7,)))(jax.numpy.zeros(3))"
    )
    for way in ("auto", "off", "remove_frames", "quiet_remove_frames", "tracebackhide"):
        reason = reason_line(ended("-c", code, way).stderr)
        assert reason.startswith("TypeError: cannot reshape array of shape (3,)")
        assert "simplicity" not in reason


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ("", ""),
        ("\n\n", ""),
        ("one\ntwo\n\n", "two"),
        ("---------------\n", "---------------"),  # nothing else was printed
        ("\n".join(['  File "x.py", line 3, in f', "    g()", "KeyError: 'a'", "-" * 20,
            "For simplicity, JAX has removed its internal frames from ..."]), "KeyError: 'a'"),
        ("warning\n\nDuring handling of the above exception, another exception occurred:\n",
            "warning"),
    ],
)  # fmt: skip
def test_what_is_cut_off_or_no_traceback(printed, line):
    assert reason_line(printed) == line


def test_a_crash_is_named_by_what_crashed():
    code = "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()"
    printed, status = printed_by(code)
    assert status == -11
    assert reason_line(printed, crashed=True) == "Fatal Python error: Segmentation fault"
    for said in (
        "F0000 00:00:17 12 pjrt.cc:88] Check failed: a == b (1 vs. 2)",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "python: x.c:3: main: Assertion `a' failed.",
    ):
        stack = f"{said}\n*** Check failure stack trace: ***\n    @     0x7f main\n"
        before = 'Traceback (most recent call last):\n  File "x", line 1\nValueError: old\n'
        assert reason_line(before + stack, crashed=True) == said
    assert reason_line("loading\n", crashed=True) == "loading"
