"""A scripted worker in a process of its own, all of whose slots emit in every step.

`python -m jax_specdec.child tests.support.emitting_worker` is commanded as the real one is. What a
step emits is no function of the texts, which may be long. A step takes `EMITTING_WORKER_PACE`
microseconds; without it, it is made as fast as the reader takes it.
"""

import os
import time

from jax_specdec.records.encode import SlotContents
from tests.support import scripted_process
from tests.support.scripted_worker import ScriptedWorker, rows_of

TOKENS = 2  # of a slot and step
PACE = "EMITTING_WORKER_PACE"


class EmittingWorker(ScriptedWorker):
    def launch(self):
        time.sleep(int(os.environ.get(PACE, 0)) * 1e-6)
        return super().launch()

    def slot_step(self, slot):
        n = min(TOKENS, slot.left)
        slot.left -= n
        slot.ended = slot.left == 0
        rows = rows_of(slot, [-1.0] * n, slot.params.num_columns)
        return SlotContents(token_ids=[7] * n, num_drafts=TOKENS - 1, **rows), []


def main(child):
    return scripted_process.main(child, EmittingWorker)
