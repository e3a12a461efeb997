"""What adapters do to a peer, on a small package of that kind."""

import importlib
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_specdec.adapters.replacing import replaced, without_refusal

FILES = {
    "__init__": "",
    "losses": """
        import jax
        def logprob(x):
            return x - 1
        def score(x):
            return 10 * logprob(x)
        jitted = jax.jit(score)
        class Sampler:
            def draw(self, x):
                return logprob(x)
            again = draw
        def step(asked, known=()):
            def known_as(x):
                return x if x in known else logprob(x)
            if known:
                if asked == 3:
                    raise ValueError("3 is refused.")
                else:
                    asked += 1
            if asked == 4:
                raise ValueError("4 is refused.")
            if asked == 5:
                raise ValueError("5 is refused.")
            if asked == 5:
                raise ValueError("5 is refused.")
            return known_as(asked)
    """,
    "trainer": "from peer.losses import Sampler, jitted, logprob as name",
    "late": "from peer.losses import logprob",
}


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A package of these files; its module of losses."""
    (tmp_path / "peer").mkdir()
    for name, text in FILES.items():
        lines = [line[8:] if line.startswith(" " * 8) else line for line in text.split("\n")]
        (tmp_path / "peer" / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("peer.trainer")
    yield sys.modules["peer.losses"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "peer"]:
        del sys.modules[name]


def ours(x):
    return x + 1


def test_a_function_is_replaced_wherever_the_package_holds_it(peer, monkeypatch):
    """And nowhere else: a name that begins alike is no module of the package."""
    trainer, theirs, other = sys.modules["peer.trainer"], peer.logprob, type(sys)("peerless")
    other.logprob = theirs
    monkeypatch.setitem(sys.modules, "peerless", other)
    x, mine = jnp.float32(5), jax.jit(lambda x: peer.score(x))
    assert (trainer.jitted(x), mine(x)) == (40, 40)
    with replaced("peer", {"peer.losses:logprob": ours}) as names:
        assert names == ("peer.losses.logprob", "peer.trainer.name")
        assert (peer.logprob, trainer.name, other.logprob) == (ours, ours, theirs)
        assert (trainer.jitted(x), mine(x)) == (60, 60)
        late = importlib.import_module("peer.late")
        assert late.logprob is ours
    assert (peer.logprob, trainer.name, late.logprob) == (theirs, theirs, theirs)
    assert (trainer.jitted(x), mine(x)) == (40, 40)


def test_a_method_is_replaced_under_all_of_its_names(peer):
    theirs = peer.Sampler.draw
    with replaced("peer", {"peer.losses:Sampler.draw": lambda self, x: 7}) as names:
        assert names == ("peer.losses.Sampler.again", "peer.losses.Sampler.draw")
        assert peer.Sampler().again(5) == 7
    assert peer.Sampler.draw is peer.Sampler.again is theirs


def test_an_error_restores_and_a_second_install_changes_nothing(peer):
    theirs, new = peer.logprob, {"peer.losses:logprob": ours}
    with pytest.raises(KeyError), replaced("peer", new), replaced("peer", new) as names:
        raise KeyError(names)
    assert names == ()
    assert peer.logprob is theirs
    with replaced("peer", new):
        with replaced("peer", new):
            pass
        assert peer.logprob is ours


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("peer.losses:gone", r"peer\.losses has no gone"),
        ("peer.losses:Sampler.gone", r"peer\.losses has no Sampler\.gone"),
        ("peer.gone:logprob", r"No module named 'peer\.gone'"),
    ],
)
def test_a_missing_name_is_refused_before_any_change(peer, name, error):
    theirs = peer.logprob
    with (
        pytest.raises((AttributeError, ImportError), match=error),
        replaced("peer", {"peer.losses:logprob": ours, name: ours}),
    ):
        pass
    assert peer.logprob is theirs


def test_a_refusal_is_left_out_and_nothing_else(peer):
    with pytest.raises(ValueError, match="4 is refused"):
        peer.step(4)
    step = without_refusal("peer.losses:step", "4 is refused.")
    with pytest.raises(ValueError, match="5 is refused"):
        step(5)
    with replaced("peer", {"peer.losses:step": step, "peer.losses:logprob": ours}):
        assert peer.step(4) == 5
        assert peer.step(6, known=(7,)) == 7
    with pytest.raises(ValueError, match="4 is refused"):
        peer.step(4)


@pytest.mark.parametrize(("message", "number"), [("3 is refused.", 0), ("5 is refused.", 2)])
def test_what_is_no_single_refusal_is_refused(peer, message, number):
    with pytest.raises(AttributeError, match=f"step has {number} refusals of '{message}'"):
        without_refusal("peer.losses:step", message)
