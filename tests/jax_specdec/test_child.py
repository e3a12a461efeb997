"""A child ends with its parent: by the kernel, by the end of its pipe, and not before."""

import os
import select
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from ipc import doctor
from jax_specdec.control import ControlServer, Start, WorkerConfig, to_line
from jax_specdec.engine.child_process import ChildProcess
from tests.support.processes import ended, in_thread, is_alive, wait_for

# 2 is PR_GET_PDEATHSIG: the signal that the kernel sends when the parent ends.
CHILD = """
import ctypes
from jax_specdec import child
born = child.begin()
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))
print("watched", number.value, flush=True)
born.commands.get()
"""


def tell(process, tmp_path, parent=None):
    """Say to a child who its parent is and where its commands come from; returns what hears it."""
    listening = ControlServer(folder=tmp_path)
    config, control = WorkerConfig(vocab_size=9), listening.link().connection
    start = Start(config=config, ring="", parent=parent or os.getpid(), control=control)
    process.stdin.write(to_line(start))
    process.stdin.flush()
    return listening


def born(tmp_path, parent):
    """A child that was told."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, tell(process, tmp_path, parent)


@pytest.mark.parametrize(("parent", "said"), [(None, "watched 9\n"), (1, "")])
def test_a_child_ends_with_its_pipe_or_parent(parent, said, tmp_path):
    """Process 1 is not its parent: that one has ended."""
    process, listening = born(tmp_path, parent)
    assert process.stdout.readline() == said
    if said:
        assert process.poll() is None
        process.stdin.close()
    assert process.wait(20) == 1
    for one in (process.stdin, process.stdout, listening):
        one.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_child_leaves_signals_to_its_parent(number, tmp_path):
    """A supervisor sends them to all; the parent ends its children once it has drained."""
    process, listening = born(tmp_path, None)
    assert process.stdout.readline() == "watched 9\n"
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.stdin.close()
    assert process.wait(20) == 1
    for one in (process.stdout, listening):
        one.close()


TIED = """
import os, sys, time
from jax_specdec import child
child.die_with_parent(os.getppid())
print("tied", flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", {TIED!r}])
print(process.pid, flush=True)
time.sleep(60)
"""


def test_a_stopped_child_ends_with_its_killed_parent():
    """No thread and no pipe of the child's could see to that: the kernel does."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    ended = select.poll()
    ended.register(watch, select.POLLIN)
    assert parent.stdout.readline() == "tied\n"
    signal.pidfd_send_signal(watch, signal.SIGSTOP)
    assert not ended.poll(50)
    parent.kill()
    parent.wait()
    assert ended.poll(20_000)
    os.close(watch)
    parent.stdout.close()


def test_a_child_ends_whose_parent_ended_before_it_was_tied():
    late = TIED.replace("os.getppid()", "os.getppid() + 1")
    process = ended("-c", late, timeout=60)
    assert (process.returncode, process.stdout) == (1, "")


@pytest.mark.parametrize("kept", [True, False])
def test_a_child_outlives_the_thread_that_made_it(kept, tmp_path):
    """The kernel means the thread by the parent: the negative control starts it in that thread."""
    started = []
    output = tmp_path / "output"

    def start():
        program = (sys.executable, "-c", TIED)
        if kept:
            started.append(ChildProcess(program, output=output, env=os.environ))
        else:
            with output.open("wb") as file:
                started.append(subprocess.Popen(program, stdout=file))
        wait_for(lambda: output.read_text() == "tied\n")

    in_thread(start)
    (child,) = started
    if kept:
        assert not child.wait(0.2)
        child.send_signal(signal.SIGTERM)
        assert child.wait(20)
        assert child.exit_status == -signal.SIGTERM
        assert child.last_words() == "tied"
        child.close()
    else:
        assert child.wait(20) == -signal.SIGKILL


def test_a_start_that_no_pipe_holds_is_refused(tmp_path):
    child = ChildProcess(("sleep", "60"), output=tmp_path / "o", env=os.environ)
    with pytest.raises(OSError, match="shorten the paths"):
        child.write("x" * 10_000_000)
    child.send_signal(signal.SIGKILL)
    assert child.wait(20)
    child.close()
    child.send_signal(signal.SIGKILL)  # it has ended: nothing is done


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ChildProcess(("/nowhere",), output=tmp_path / "o", env=os.environ)


HALF_BORN = """
import os, subprocess, sys
from ipc import RingReader, doctor
me = doctor.this_process()
child = "import sys; from jax_specdec import child; child.begin(*sys.argv[1:])"
arguments = [me] if sys.argv[1] == "told" else []
process = subprocess.Popen([sys.executable, "-c", child, *arguments], stdin=subprocess.PIPE)
ring = RingReader.create(2, 64)
print(process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("told", [True, False])
def test_a_ring_of_an_engine_killed_early_is_removed(told):
    """Without the parent's name, the ring stays: so it is the child that removes it."""
    program = [sys.executable, "-c", HALF_BORN, "told" if told else "untold"]
    engine = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    child = int(engine.communicate(timeout=60)[0])
    wait_for(lambda: not is_alive(child))
    left = [file for file in doctor.find_ring_files() if file.creator.pid == engine.pid]
    doctor.remove_leftovers(left)
    assert bool(left) == (not told)


def waiting(tmp_path, code):
    """A child whose parent has said nothing yet; the module that it is to run is `code`."""
    (tmp_path / "imported_ahead.py").write_text(code)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jax_specdec.child", "imported_ahead"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_child_imports_while_its_parent_is_silent(tmp_path):
    code = "print('imported', flush=True)\ndef main(child): return 40 + child.start.process_rank"
    process = waiting(tmp_path, code)
    assert process.stdout.readline() == "imported\n"
    with closing(tell(process, tmp_path)):
        assert process.wait(60) == 40
    assert process.communicate() == ("", "")  # it is imported once


def test_a_child_that_imports_ends_with_its_pipe(tmp_path):
    process = waiting(tmp_path, "import time\nprint('imports', flush=True)\ntime.sleep(60)")
    assert process.stdout.readline() == "imports\n"
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 1


def test_an_import_that_fails_ahead_is_told_once_it_is_heard(tmp_path):
    process = waiting(tmp_path, "print('imports', flush=True)\n1 / 0")
    assert process.stdout.readline() == "imports\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    with closing(tell(process, tmp_path)):
        assert process.wait(60) == 1
    said, errors = process.communicate()
    assert said == "imports\n"
    assert errors.count("Traceback") == 1
    assert errors.endswith("ZeroDivisionError: division by zero\n")
