"""transformers reads tokenizers without torch, jax, a network, or a word on the screen."""

import itertools
import json

import pytest

from tests.support.processes import ended
from tests.support.tokenizer_kinds import KINDS, write

CODE = """
import socket, sys
def refuse(*_):
    raise AssertionError("a connection")
socket.socket.connect = refuse
from jax_specdec.text.tokenizer import Tokenizer
found = Tokenizer(sys.argv[1])
assert "transformers" in sys.modules
found.encode_chat([{"role": "user", "content": "Hi"}])
print(found.encode("the"), {"torch", "jax", "tensorflow"} & set(sys.modules))
"""
# A torch that can be installed and not be imported.
TORCH = {
    "torch/__init__.py": "raise AssertionError('torch is imported')",
    "torch-2.9.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n",
    "torch-2.9.0.dist-info/RECORD": "torch/__init__.py,,\n",
}
# Of the second one transformers knows nothing.
MODELS = (
    {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "torch_dtype": "bfloat16"},
    {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "dtype": "float32"},
    {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "torch_dtype": "float16"},
)
USE = """
from jax_specdec.text.transformers_library import import_transformers
import_transformers()
from transformers import modeling_rope_utils
try:
    modeling_rope_utils.torch.Tensor
except AssertionError as error:
    print(error)
"""


@pytest.fixture
def with_torch(tmp_path):
    folder = tmp_path / "site"
    for name, text in TORCH.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return {"PYTHONPATH": str(folder)}


def run(code, env, *arguments):
    return ended("-W", "error", "-c", code, *arguments, env={"PATH": "/usr/bin:/bin", **env})


@pytest.mark.long
def test_reading_imports_no_torch_and_says_nothing(with_torch, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    write(model, KINDS["mistral"]())
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for env, config in itertools.product(({}, with_torch), MODELS):
        (model / "config.json").write_text(json.dumps(config))
        done = run(CODE, env, model)
        assert (done.stdout[-6:], done.stderr) == ("set()\n", "")


def test_torch_is_imported_where_something_of_it_is_used(with_torch):
    """The control: who asks the stand-in for something gets torch itself."""
    done = run(USE, with_torch)
    assert (done.stdout, done.stderr) == ("torch is imported\n", "")
