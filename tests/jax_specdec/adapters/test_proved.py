"""An adapter takes a peer by its functions, whatever its release is, or refuses it by name."""

import copy
import json
import sys

import jax
import numpy as np
import pytest

from jax_specdec.adapters import maxtext, proved, sglang_jax, tpu_inference, tunix
from jax_specdec.adapters.fingerprint import fingerprint
from tests.peers.prove import ADAPTERS, added

OF = {"google-tunix": tunix, "maxtext": maxtext, "sglang-jax": sglang_jax,
      "tpu-inference": tpu_inference}  # fmt: skip
NAME = "tunix.rl.algo_core:compute_entropy_from_logits"
# As tunix 0.1.7 has it, in another layout.
ENTROPY = '''
"""Losses."""
import jax
from jax import numpy as jnp

def compute_entropy_from_logits(logits: jax.Array) -> jax.Array:
  """Another docstring."""
  log_probs = jax.nn.log_softmax(logits, axis=-1)
  # A comment.
  probs = jax.nn.softmax(log_probs)
  return -jnp.sum(probs * log_probs,
                  axis=-1)

def _half(log_probs):
  return jnp.exp(log_probs).astype("float16"), log_probs.astype("float16")
'''


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """Writes a tunix of one module and a release; its `compute_entropy_from_logits`."""

    def write(text, release):
        folder = tmp_path / "tunix" / "rl"
        folder.mkdir(parents=True)
        for path in (folder.parent, folder):
            (path / "__init__.py").touch()
        (folder / "algo_core.py").write_text(text)
        (tmp_path / "google_tunix.dist-info").mkdir()
        (tmp_path / "google_tunix.dist-info" / "METADATA").write_text(
            f"Name: google-tunix\nVersion: {release}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        return lambda: sys.modules["tunix.rl.algo_core"].compute_entropy_from_logits

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "tunix"]:
        del sys.modules[name]


def refusal():
    with pytest.raises(ImportError) as error, tunix.install():
        pass
    return str(error.value)


@pytest.mark.parametrize("release", ["0.1.7", "0.1.9.dev20261128", "7.0"])
def test_a_release_of_any_name_with_the_same_functions_is_taken(release, peer):
    theirs = peer(ENTROPY, release)
    with tunix.install() as names:
        assert names == ("tunix.rl.algo_core.compute_entropy_from_logits",)
        assert theirs() is tunix.compute_entropy_from_logits
    assert theirs().__module__ == "tunix.rl.algo_core"


@pytest.mark.parametrize("release", ["0.1.7", "0.1.8"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("axis=-1)\n  #", "axis=1)\n  #"),
        ("jax.nn.softmax", "jnp.exp"),
        ("from jax import numpy as jnp", "import numpy as jnp"),
        ("(logits: jax.Array)", "(logits: jax.Array, base=2)"),
    ],
)
def test_another_function_is_refused_by_name_before_a_change(release, old, new, peer):
    assert old in ENTROPY
    theirs = peer(ENTROPY.replace(old, new), release)
    said = refusal()
    assert said.startswith(f"google-tunix {release} is installed, and the adapter was proved with ")
    assert "0.1.7" in said
    assert "tunix.rl.algo_core.compute_entropy_from_logits cannot be replaced: it is an" in said
    if "tunix.rl.algo_core" in sys.modules:
        assert theirs().__module__ == "tunix.rl.algo_core"


OTHERS = "its results on eight rows are others"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("return -jnp", "return -2 * jnp", OTHERS),
        ("axis=-1)\n\n", "axis=-1)[None]\n\n", OTHERS),
        ("probs = jax.nn.softmax(log_probs)", "probs, log_probs = _half(log_probs)", OTHERS),
        ("return -jnp", "return (), -jnp", OTHERS),
        ("return -jnp", "return nothing + -jnp", "it fails on eight rows (name 'nothing' is not"),
    ],
)
def test_other_results_of_a_proved_function_are_refused(old, new, why, peer, monkeypatch):
    """As where a package that it calls has changed: its fingerprint is made the proved one."""
    text = ENTROPY.replace(old, new)
    assert text != ENTROPY
    theirs = peer(text, "0.1.7")
    data = copy.deepcopy(proved.peers())
    folder = proved.folder_of("google-tunix", "tunix")
    data["google-tunix"]["functions"][NAME][fingerprint(folder, NAME)] = ["0.1.7"]
    monkeypatch.setattr(proved, "peers", lambda: data)
    assert why in refusal()
    assert theirs().__module__ == "tunix.rl.algo_core"


def test_a_function_that_is_gone_is_named(peer):
    peer(ENTROPY.replace("def compute", "def count"), "0.1.7")
    said = refusal()
    assert "compute_entropy_from_logits cannot be replaced: tunix has no tunix.rl.common." in said


@pytest.mark.parametrize("distribution", OF)
def test_a_peer_that_is_not_installed_says_how_to_install_it(distribution):
    with pytest.raises(ImportError) as error, OF[distribution].install():
        pass
    release = proved.releases(distribution)[-1]
    assert str(error.value).startswith(f"{distribution} is not installed; the adapter was proved")
    assert str(error.value).endswith(f": pip install {distribution}=={release}")


@pytest.mark.parametrize("distribution", OF)
def test_every_function_of_an_adapter_has_a_proved_fingerprint(distribution):
    peer = proved.peers()[distribution]
    assert set(peer["functions"]) == set(OF[distribution].FUNCTIONS)
    for known in peer["functions"].values():
        assert known
        for versions in known.values():
            assert set(versions) <= set(peer["versions"])
    assert all(name.startswith(f"{peer['package']}.") for name in peer["functions"])


def test_a_version_is_added_to_those_that_are_proved():
    peer = {"package": "a", "versions": ["0.9.0"], "functions": {"a:f": {"1": ["0.9.0"]}}}
    peer = added(peer, {"a:f": "1", "a:g": "2"}, "0.10.0")
    peer = added(peer, {"a:f": "3"}, "0.9.1")
    assert peer["versions"] == ["0.9.0", "0.9.1", "0.10.0"]
    assert peer["functions"] == {
        "a:f": {"1": ["0.9.0", "0.10.0"], "3": ["0.9.1"]},
        "a:g": {"2": ["0.10.0"]},
    }
    assert set(ADAPTERS) == set(OF) == set(json.loads(proved.DATA.read_text()))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (np.float32([1, 2]), np.float32([1, 2.001])),
        (np.float32([1, np.nan]), np.float32([1, 2])),
        (np.int32([1, 2]), np.int32([1, 3])),
        (np.int32([1]), np.int64([1])),
        ([1.0, 2.0], [1.0]),
        ([np.zeros(2)], (np.zeros(2),)),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}),
    ],
)
def test_comparing_sees_every_difference(theirs, ours):
    def compare(one, other):
        proved.compare("maxtext", "maxtext:f", lambda: one, lambda: other)

    compare(theirs, jax.tree.map(lambda x: x, theirs))
    compare(ours, ours)
    with pytest.raises(ImportError, match=r"maxtext\.f cannot be replaced: its results"):
        compare(theirs, ours)
