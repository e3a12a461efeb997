"""The engine tells the output processor what its workers may send."""

import pytest

from ipc.wire import Kind
from jax_specdec.records import output_processor
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.output_processor import ProcessorError
from tests.support.scene import Scene, long_requests

pytestmark = pytest.mark.fast


def test_more_drafts_than_configured_are_refused_after_a_restart_too():
    scene = Scene(num_drafts=5, on_worker_loss="restart", resume_lost=True, faults={0: [3]})
    (session,) = scene.engine.sessions
    worker = session.worker
    assert session.state.num_drafts == 5
    scene.run(long_requests(2))
    assert session.worker is not worker
    slot = SlotContents(token_ids=[1], num_drafts=6)
    with pytest.raises(ProcessorError, match=r"slot 0: 6 drafts; .* proposes 5 at most"):
        output_processor.step(session.state, decode(encode(Kind.TARGET, 0, [slot])))
