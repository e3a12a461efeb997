"""The lane `wheels`: the wheel in empty environments of each Python, with several jax.

    python -m tests.heavy.wheels [VERSION ...]      of all Pythons, or of these

Outside of the checkout, each environment imports the doors, computes logprobs and generates a text
through an engine and its worker. Two more have the kernels alone: jax, numpy and jaxtyping, and the
wheel without what it depends on. What passed is kept for docs/compatibility.md.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support import compatibility
from tests.support.paths import ROOT

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST, MIDDLE, NEWEST = "jax==0.10.2", "jax==0.11.2", "jax"
KERNELS = """
import jax, jax.numpy as jnp
from pallas_kernels import topk_logprobs
from pallas_kernels.sampling import Drafts, Sampling, emitted_logprobs, verify
found = topk_logprobs(jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]])), jnp.array([1]), 2)
assert found.token_ids.tolist() == [[1, 0, 1]]
assert abs(float(found.logprobs[0, 0]) - float(jnp.log(0.25))) < 1e-6
verified = verify(jnp.zeros((1, 1, 8)), Drafts.none(1, 0, 8), Sampling.greedy(1), jnp.zeros(1, int))
assert verified.token_ids.tolist() == [[0]]
"""
WHOLE = f"""{KERNELS}
import ipc, jax_specdec.engine, jax_specdec.export, jax_specdec.device, jax_specdec.adapters
from jax_specdec.ray import RayConfig
"""
ENGINE = """
from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams, Serves, byte_tokens
if __name__ == "__main__":
    params = SamplingParams(max_tokens=8, logprobs=2)
    prompt = byte_tokens.encode("def ", start_document=True)
    config = EngineConfig(vocab_size=byte_tokens.VOCAB_SIZE, serves=Serves.of([params]))
    with Engine(config) as engine:
        requests = [Request(id="a", prompt_token_ids=prompt, params=params)]
        records = [one for update in engine.generate(requests) for one in update.records]
    print(sum(one.num_tokens for one in records), records[-1].finish_reason.name)
"""


def interpreter(version):
    """A Python of this version that works; None: there is none."""
    hidden = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for one in (shutil.which(f"python{version}"), *hidden):
        if one and not subprocess.run([one, "-V"], capture_output=True, check=False).returncode:
            return str(one)
    return None


def run(*command, **named):
    """Run a command; what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **named)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def installed(folder, python, *requirements):
    """An environment with nothing but these; its Python."""
    run(python, "-m", "venv", folder)
    own = str(folder / "bin" / "python")
    install = [own, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    for each in requirements:
        run(*install, *each)
    return own


def checked(folder, own, code):
    """Run the code outside of the checkout; the versions of Python and jax."""
    run(own, "-c", code, cwd=folder)
    found = run(
        own, "-c", "import jax, platform; print(platform.python_version(), jax.__version__)"
    )
    return found.split()


def whole(folder, python, wheel, jax):
    """The wheel with what it depends on: doors, kernels, and a text through an engine."""
    own = installed(folder, python, [str(wheel), jax])
    versions = checked(folder, own, WHOLE)
    run(own, "-m", "pip", "check")
    (Path(folder) / "engine.py").write_text(ENGINE)
    assert run(own, "engine.py", cwd=folder).strip() == "8 LENGTH"
    return versions


def alone(folder, python, wheel, jax):
    """The kernels alone, as the page Install has it."""
    own = installed(folder, python, [jax, "numpy", "jaxtyping"], ["--no-deps", str(wheel)])
    return checked(folder, own, KERNELS)


def main(versions):
    """Exit status 1 where one fails."""
    with tempfile.TemporaryDirectory() as made:
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", made, ROOT)
        (wheel,) = Path(made).glob("*.whl")
        failed = False
        for version in versions:
            python = interpreter(version)
            if python is None:
                print(f"NOT RUN: Python {version}: none is at hand", flush=True)
                continue
            kinds = [(whole, jax) for jax in (OLDEST, MIDDLE, NEWEST)]
            kinds += [(alone, OLDEST if version == PYTHONS[0] else NEWEST)]
            for kind, jax in kinds:
                start = time.monotonic()
                what = {whole: "the wheel", alone: "the kernels alone"}[kind]
                if version == "3.11" and jax == MIDDLE:
                    continue  # which needs Python 3.12
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        found = kind(Path(folder), python, wheel, jax)
                    except (RuntimeError, AssertionError, ValueError) as error:
                        failed = True
                        print(f"FAILED: {what}, Python {version}, {jax}: {error}", flush=True)
                        continue
                compatibility.keep(f"{what} in an empty environment", *found)
                took = time.monotonic() - start
                print(f"{what}: Python {found[0]}, jax {found[1]}: ok, {took:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PYTHONS))
