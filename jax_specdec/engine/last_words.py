"""Why a process ended, as one line of all that it has printed.

The last line is seldom the reason. Behind an exception's line stand the rest of its message, its
notes (JAX adds some of its own to every error), and what is printed while Python shuts down; behind
a crash stand lists of threads and modules.
"""

import re

LOST = "lost: "  # begins, after the time, the line that is added to a lost worker's output
_HEADER = re.compile(r"(?:  \+ Exception Group )?Traceback \(most recent call last\):")
FRAME = re.compile(r'(?:  \| )?  File ".*", line \d+')
MARGIN = "  | "  # of a group of exceptions
ELSEWHERE = ("Exception ignored ", "Exception in thread ")  # begin what ended no process
CRASH = re.compile(
    r"Fatal Python error: |.*\bCheck fail(?:ed|ure): |terminate called |F\d{4} \d\d:|.*: Assertion "
)
NOTES = re.compile(
    r"-{10,}$"
    r"|For simplicity, JAX has removed its internal frames"
    r"|The stack trace below excludes JAX-internal frames"
    r"|The preceding is the original exception"
    r"|The above exception was the direct cause of"
    r"|During handling of the above exception"
    r"|Extension modules: "
    r"|\*\*\* Check failure stack trace"
    r"|(?:Current t|T)hread 0x[0-9a-f]+ "
)


def reason_line(printed: str, *, crashed: bool = False) -> str:
    """The line that says why; empty where nothing was printed.

    Args:
      printed: the end of what the process has printed.
      crashed: a signal ended it, so that no exception did.
    """
    lines = printed.splitlines()
    if crashed:
        for line in reversed(lines):
            if CRASH.match(line):
                return line.strip()
    elif line := _exception_line(lines):
        return line
    for line in reversed(lines):
        text = line.strip()
        if text and not NOTES.match(text) and not line.startswith((" ", "\t")):
            return text
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _exception_line(lines: list[str]) -> str:
    """The first line of the last exception that was printed with a traceback; empty for none.

    Of those, one that was raised in a thread or ignored comes behind any other.
    """
    starts = [at for at, line in enumerate(lines) if _HEADER.match(line)]
    ended = [at for at in starts if not at or not _elsewhere(lines, at)]
    if starts:
        return _behind(lines, (ended or starts)[-1] + 1)
    # The header of a long traceback may be cut off: then its last frame shows where it was.
    frames = [at for at, line in enumerate(lines) if FRAME.match(line)]
    return _behind(lines, frames[-1] + 1) if frames else ""


def _elsewhere(lines: list[str], header: int) -> bool:
    return lines[header - 1].startswith(ELSEWHERE)


def _behind(lines: list[str], begin: int) -> str:
    """The first line from there on that is no frame, with the next one where it says nothing."""
    message = ""
    for line in lines[begin:]:
        text = line.removeprefix(MARGIN).rstrip()
        # Marks under a line of code may begin at its margin.
        if not text or text.startswith((" ", "\t")) or not text.strip("^~ "):
            continue
        if message:
            return message if NOTES.match(text) else f"{message} {text}"
        if not text.endswith(":"):
            return text
        message = text  # the message begins with the next line
    return message
