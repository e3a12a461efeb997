"""Processes under jax.distributed that share a model: one publishes, all do the same."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from jax_specdec.device.model import sharding
from jax_specdec.records.decode import decode
from tests.support import distributed_worker, quick_compile

TIMEOUT = 240


def run_processes(count):
    """The outputs of `count` processes."""
    with socket.socket() as held:  # until they have ended: no other program gets the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # but their coordinator
        held.bind(("127.0.0.1", 0))
        return outputs_of(count, held.getsockname()[1])


def outputs_of(count, port):
    environment = os.environ | {"XLA_FLAGS": quick_compile.FLAGS}  # one device each
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.distributed_worker",
                str(rank),
                str(count),
                str(port),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def ids_of(result):
    """Emitted ids by slot, from the messages."""
    found = {}
    for words in result["messages"]:
        message = decode(np.array(words, np.uint32).tobytes())
        for slot in range(3):
            found.setdefault(slot, []).extend(message.slot(slot).token_ids.tolist())
    return found


@pytest.mark.slow
def test_one_of_two_processes_publishes_and_both_do_the_same():
    first, second = run_processes(2)
    assert second["messages"] == []
    assert first["slots"] == second["slots"]
    assert first["steps"] == second["steps"] == len(first["messages"])
    # Both took over the same entries of another slot: the last two prompts begin alike.
    assert first["reused"] == second["reused"] == 4
    alone = distributed_worker.run(sharding.ONE_DEVICE, publish=True)
    assert first["slots"] == alone["slots"]
    assert ids_of(first) == ids_of(alone)
