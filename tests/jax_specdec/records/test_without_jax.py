"""The engine's side, from a message to JSON, on a machine where jax cannot be imported."""

import subprocess
import sys

import pytest

from tests.support.import_rules import PACKAGES, is_engine_side, modules

pytestmark = pytest.mark.fast


REFUSE_JAX = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "pallas_kernels"):
            raise ModuleNotFoundError(f"No module named {name!r}: refused", name=name)

sys.meta_path.insert(0, Refuse())
"""

MESSAGE_TO_JSON = """
import json
from ipc import RingReader, RingWriter
from ipc.wire import Kind
from jax_specdec.engine import output_processor as op
from jax_specdec.export import openai
from jax_specdec.records.decode import decode
from jax_specdec.text.detokenize import TokenTable
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.requests import Request, SamplingParams

request = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=2, logprobs=1))
state = op.admit(op.ProcessorState.empty(1), 0, 1, request)
slot = SlotContents(generation=1, num_drafts=1, columns=2, token_ids=[65, 66], token_ranks=[1, 1],
                    logprobs=[[-0.5, -0.5], [-0.25, -0.25]], topk_ids=[[65], [66]])
with RingReader.create(2, 4096) as reader, RingWriter.attach(reader.name) as writer:
    writer.send(encode(Kind.TARGET, 0, [slot]))
    state, records = op.step(state, decode(reader.receive(5).data))
table = TokenTable(lambda id: bytes([id]))
print(json.dumps(openai.completion_logprobs(records, table)["token_logprobs"]))
"""


def without_jax(code):
    """Run `code` in a process where jax cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", REFUSE_JAX + code], capture_output=True, text=True, check=False
    )


def test_the_engine_side_works_on_a_machine_without_jax():
    names = [name for name in modules(*PACKAGES) if is_engine_side(name)]
    assert {
        "jax_specdec.engine.engine",
        "jax_specdec.cli.main",
        "jax_specdec.cli.demo_command",
        "ipc.reader",
    } <= set(names)
    done = without_jax(f"import {', '.join(names)}\n{MESSAGE_TO_JSON}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[-0.5, -0.25]\n"
    failed = without_jax("import jax_specdec.device.loop.step")
    assert "No module named 'jax': refused" in failed.stderr
