"""Kernels run by default where they were proved, by their sources; XLA elsewhere, with a word."""

import ast
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.cli import proved_kernels
from pallas_kernels import gpu_obstacle, topk_logprobs, use_implementation
from pallas_kernels.backends import proved
from pallas_kernels.backends.mosaic_gpu import limits
from pallas_kernels.testing import ground, pieces
from tests.support import lowered

X, IDS = jnp.zeros((4, 4096), jnp.float32), jnp.zeros(4, jnp.int32)
KERNEL = "mosaic_gpu_v2"
CHIP = "NVIDIA H200"


@pytest.fixture
def files(monkeypatch, tmp_path):
    """The two files, empty; nothing is known of others."""
    package, user = tmp_path / "package.json", tmp_path / "user.json"
    monkeypatch.setattr(proved, "PACKAGE_FILE", package)
    monkeypatch.setattr(proved, "user_file", lambda: user)
    forget()
    yield package, user
    forget()


def forget():
    """As in a process that has read no file; the newest jax keeps what it lowered, too."""
    proved.proved_digests.cache_clear()
    proved.warn_once.cache_clear()
    jax.clear_caches()


@pytest.fixture
def chip(monkeypatch):
    """This process has one."""
    monkeypatch.setattr(proved, "device_kind", lambda _: CHIP)
    monkeypatch.setattr(limits, "cuda_capability", lambda: 9.0)


def proof(**changes):
    entry = proved.Proof(CHIP, proved.minor_version(), "mosaic_gpu", "rows",
                         proved.kernel_digest("mosaic_gpu", "rows"))  # fmt: skip
    return entry._replace(**changes)._asdict()


def on_cuda():
    return lowered.text_of(lambda x, ids: topk_logprobs(x, ids, 3), X, IDS)


def test_kernels_without_a_proof_leave_it_to_xla(files, chip):
    with pytest.warns(RuntimeWarning, match="nobody has checked them on NVIDIA H200") as said:
        assert KERNEL not in on_cuda()
    assert "check-device --keep" in str(said[0].message)
    assert 'use_implementation("mosaic_gpu")' in str(said[0].message)
    assert KERNEL not in on_cuda()  # and nothing is said a second time
    assert "nobody has checked them" in gpu_obstacle(X)
    with use_implementation("mosaic_gpu"):
        assert KERNEL in on_cuda()
        assert gpu_obstacle(X) is None


@pytest.mark.parametrize("file", [0, 1])
def test_a_proof_of_the_package_or_the_user_counts(files, chip, file):
    files[file].write_text(json.dumps([proof()]))
    assert KERNEL in on_cuda()
    assert "nobody has checked them" in gpu_obstacle(X)  # the job groups is not proved
    forget()
    groups = proof(job="groups", digest=proved.kernel_digest("mosaic_gpu", "groups"))
    files[file].write_text(json.dumps([proof(), groups]))
    assert gpu_obstacle(X) is None


@pytest.mark.parametrize("changes", [
    {"device": "NVIDIA H100"}, {"jax": "0.9"}, {"backend": "mosaic_tpu"}, {"job": "draw"},
    {"digest": "0" * 16},
])  # fmt: skip
def test_a_proof_of_something_else_does_not(files, chip, changes):
    files[0].write_text(json.dumps([proof(**changes)]))
    with pytest.warns(RuntimeWarning, match="XLA computes"):
        assert KERNEL not in on_cuda()


def test_kernels_that_changed_since_they_passed_are_said_to_have(files, chip):
    files[0].write_text(json.dumps([proof(digest="0" * 16)]))
    files[1].write_text(json.dumps([proof(digest="1" * 16)]))
    with pytest.warns(RuntimeWarning, match="they have changed since they passed on NVIDIA H200"):
        assert KERNEL not in on_cuda()
    forget()
    files[1].write_text(json.dumps([proof(digest="1" * 16), proof()]))
    assert KERNEL in on_cuda()


def test_programs_for_a_device_that_is_not_here_have_no_kernel(files, monkeypatch):
    monkeypatch.setattr(limits, "cuda_capability", lambda: None)
    with pytest.warns(RuntimeWarning, match="nobody knows on which device"):
        assert KERNEL not in on_cuda()


def test_values_on_a_cpu_take_no_look_at_proofs(monkeypatch):
    monkeypatch.setattr(proved, "obstacle", None)
    np.testing.assert_array_equal(topk_logprobs(X, IDS, 1).token_ids, np.zeros((4, 2)))


def test_the_packages_entries_are_of_the_sources_as_they_are():
    """A change of a kernel ends its entries: take them away, and say so in the commit."""
    assert ended(proved.read_entries(proved.PACKAGE_FILE)) == []
    stale = proved.Proof(CHIP, "0.10", "mosaic_gpu", "rows", "0" * 16)
    assert ended([stale]) == [stale]  # the control


def ended(proofs):
    return [each for each in proofs if each.digest != proved.kernel_digest(each.backend, each.job)]


SOURCE = """
def f(x, y=2):
    '''What it does.'''
    total: int = x + y  # a comment
    return [total * each for each in range(total)]
"""


@pytest.mark.parametrize(("old", "new", "same"), [
    ("What it does", "Another word", True),
    ("  # a comment", "", True),
    ("total", "sums", True),
    ("each", "one", True),
    (": int", "", False),  # another statement
    ("y=2", "y=3", False),
    ("x + y", "x - y", False),
    ("x + y", "y + x", False),
    ("y", "z", False),  # an argument is named by calls
    ("range(total)", "range(x)", False),
    ("def f", "def g", False),
])  # fmt: skip
def test_a_digest_is_of_what_is_computed(old, new, same):
    words = [proved.source_of(ast.parse(text)) for text in (SOURCE, SOURCE.replace(old, new))]
    assert (words[0] == words[1]) == same


def test_two_locals_that_change_places_are_another_source():
    texts = ("def f():\n a = 1\n b = 2\n return a", "def f():\n a = 1\n b = 2\n return b")
    assert proved.source_of(ast.parse(texts[0])) != proved.source_of(ast.parse(texts[1]))


def test_a_digest_follows_what_a_kernel_imports(monkeypatch, tmp_path):
    house = tmp_path / "pallas_kernels"
    for name, text in {
        "backends/mosaic_gpu/rows.py": "from pallas_kernels.numbers import keys\nimport os\n",
        "numbers/keys.py": "from pallas_kernels.lowering.forms import one\nA = 1\n",
        "lowering/forms.py": "one = 1\n",
    }.items():
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        (house / name).write_text(text)
    monkeypatch.setattr(proved, "HOUSE", house)
    digest_of = proved.kernel_digest.__wrapped__
    before = digest_of("mosaic_gpu", "rows")
    assert digest_of("mosaic_gpu", "rows") == before
    (house / "lowering/forms.py").write_text("one = 2\n")
    assert digest_of("mosaic_gpu", "rows") != before


def test_what_check_device_proves_is_what_it_checks():
    for backend, jobs in proved.JOBS.items():
        entries = ground.proofs(backend, CHIP)
        assert [entry["job"] for entry in entries] == [*jobs]
        for entry in entries:
            assert entry["parts"], entry
            assert {*entry["parts"]} <= {*pieces.parts_of(backend)}
            assert [*proved_kernels.PROOF_FIELDS, "parts"] == [*entry]
    checked = {part for entry in ground.proofs("mosaic_gpu", CHIP) for part in entry["parts"]}
    assert checked == {part for part in pieces.CHECK_PARTS if part in pieces.parts_of("mosaic_gpu")}


def test_both_sides_name_one_file():
    assert proved_kernels.file() == proved.user_file()
    assert proved.Proof._fields == proved_kernels.PROOF_FIELDS


def test_a_device_kind_is_that_of_all_devices(monkeypatch):
    kinds = dataclasses.make_dataclass("Device", ["device_kind"])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [kinds("a"), kinds("a")])
    assert proved.device_kind("cuda") == "a"
    assert proved.device_kind("tpu") is None
    monkeypatch.setattr(jax, "local_devices", lambda: [kinds("a"), kinds("b")])
    assert proved.device_kind("cuda") is None
