"""Processes that a test starts: whether they are alive, and what they leave behind."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from ipc.doctor import find_ring_files

CREATORS = {os.getpid()}  # processes of this test run that make rings


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended while it was read
        return False


def children_of(pid):
    """Ids of the processes that any thread of `pid` has started and that have not been reaped."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this thread has
                found += map(int, (task / "children").read_text().split())
    return found


def family(pid):
    """Ids of the living processes below `pid`, the children of children too."""
    alive = filter(is_alive, children_of(pid))
    return [one for child in alive for one in (child, *family(child))]


def marked(text):
    """Ids of the living processes that were started with this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if text.encode() in path.read_bytes() and is_alive(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_thread(call, *arguments, **options):
    """Call in a thread of its own, which is over when this returns; `options` are the thread's."""
    thread = threading.Thread(target=call, args=arguments, **options)
    thread.start()
    thread.join()


def ended(*arguments, **options):
    """How a run of Python with these arguments ended, and what it printed."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def output_of(program, *arguments, quiet=False, **options):
    """What a program in Python prints, which ends well; `quiet`: with no warning nor message."""
    warnings = ["-W", "error"] if quiet else []
    done = ended(*warnings, "-c", program, *arguments, **options)
    assert done.returncode == 0, done.stderr
    assert not (quiet and done.stderr), done.stderr
    return done.stdout


def no_ring_is_left():
    """Whether no ring of a process in `CREATORS` is in shared memory."""
    return not [file for file in find_ring_files() if file.creator.pid in CREATORS]
