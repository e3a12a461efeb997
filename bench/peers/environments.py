"""An environment of its own for each peer, with what its functions import.

It has the jax that the peer runs with, the peer without its dependencies, and what its modules
import; `stand_ins.py` has the rest. It is made once, in the folder for temporary files, and kept
for as long as its list of packages stays the same.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# What the tests import, and this package: of its columns and examples too.
COMMON = ["pytest", "hypothesis", "jaxtyping", "numpy", "msgpack", "posix_ipc", "pyzmq", "rich",
          "safetensors", "xxhash"]  # fmt: skip
# Peer: what is installed without dependencies, and what with them.
PEERS = {
    "tunix": (
        ["google-tunix==0.1.7", "safetensors", "huggingface_hub", "einops", "tenacity", "qwix"],
        ["jax==0.11.2", "flax==0.12.12", "humanize"],
    ),
    "maxtext": (
        ["maxtext==0.2.5"],
        ["jax==0.11.2", "flax==0.12.12", "absl-py", "aqtp", "drjax", "etils", "grain", "omegaconf",
         "opentelemetry-api", "pathwaysutils", "pillow", "pydantic", "qwix", "requests",
         "sentencepiece", "sympy", "tiktoken", "tokamax", "transformers", "uvicorn", "fastapi",
         "jinja2"],
    ),
    # It asks for jax 0.8, which is older than what this library needs.
    "sglang_jax": (
        ["sglang-jax==0.0.2"],
        ["jax==0.10.2", "flax==0.12.6", "transformers", "pyzmq", "fastapi", "orjson",
         "partial_json_parser"],
    ),
    "tpu_inference": (["tpu-inference==0.32.0"], ["jax==0.11.2", "flax==0.12.10"]),
}  # fmt: skip


def newest() -> str | None:
    """A Python 3.13 or 3.12 that works; pyenv hides versions that are not selected."""
    for version in ("3.13", "3.12"):
        hidden = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}*/bin/python"))
        for one in (shutil.which(f"python{version}"), *map(str, hidden)):
            if one and not subprocess.run([one, "-V"], capture_output=True, check=False).returncode:
                return one
    return None


def environment(peer: str, python: str) -> str:
    """The Python of the peer's environment, which is made if there is none."""
    alone, whole = PEERS[peer]
    folder = Path(tempfile.gettempdir()) / f"jax-specdec-peers-{os.getuid()}" / peer
    listed, wanted = folder / "installed.txt", "\n".join([python, *COMMON, *alone, *whole])
    own = str(folder / "bin" / "python")
    if not listed.exists() or listed.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        install = [own, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, *COMMON, *whole], check=True)
        subprocess.run([*install, "--no-deps", *alone], check=True)
        listed.write_text(wanted)
    return own
