"""One step's timeline: `python -m bench profile --out DIR`.

Writes trace.json (Trace Event Format; open it at https://ui.perfetto.dev) and timeline.png. The
loop is the end-to-end benchmark's at K = 20. Some steps run as in a server, where step n + 1 is
launched before step n is read. Then some are taken apart: each part is waited for. The picture
shows a typical one of these. The device's own operations come from jax.profiler.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.gpu.device_events import recorded
from bench.loop.consumer import DECODED, PROCESSED, RECEIVED, Consumer
from bench.loop.rig import Rig
from bench.loop.setups import Setup, setups
from bench.loop.spans import DEVICE, ENGINE, RING, WORKER, DeviceEvent, Span, trace_events
from bench.loop.suite import GREEDY, K20
from bench.report import files, outputs
from jax_specdec.device.loop.programs import Compiled


class ProfiledRig(Rig):
    """A rig that records the begin and the end of every part."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spans: list[Span] = []
        self.steps: list[tuple[int, int]] = []  # begin and end of each step taken apart
        self.is_apart = False
        compiled = self.worker.compiled
        for track, name in (("step", "model, verify, draft"), ("target_message", "logprobs, pack")):
            setattr(compiled, track, self._waited(getattr(compiled, track), name))
        self.worker.advance = self._noted(self.worker.advance)  # type: ignore[method-assign]

    def _waited(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`call`, waited for while steps are taken apart: then its span is the device's time."""

        def waited(*args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic_ns()
            result = call(*args, **kwargs)
            if self.is_apart:
                jax.block_until_ready(result)  # type: ignore[no-untyped-call]
                self.spans.append(Span(DEVICE, name, begin, time.monotonic_ns()))
            return result

        return waited

    def _noted(self, advance: Callable[[], None]) -> Callable[[], None]:
        def noted() -> None:
            begin = time.monotonic_ns()
            advance()
            if not self.is_apart:
                name = "launch step n + 1, publish step n"
                self.spans.append(Span(WORKER, name, begin, time.monotonic_ns()))

        return noted

    def _apart(self) -> dict[str, int]:
        clock = time.monotonic_ns
        self.is_apart = True
        begin = clock()
        self.worker.advance()
        launched = clock()
        assert self.worker.launched is not None
        words = self.worker.launched.words
        jax.block_until_ready(words)  # type: ignore[no-untyped-call]
        ready = clock()
        for one in words:
            np.asarray(one)  # the array keeps the copy for `finish`
        copied = clock()
        self.worker.finish()
        published = clock()
        self.is_apart = False
        for name, start, end in (
            ("launch and wait", begin, launched),
            ("copy", ready, copied),
            ("check and send", copied, published),
        ):
            self.spans.append(Span(WORKER, name, start, end))
        return {"ready": ready, "published": published, "dispatch": 0,
                "begin": begin, "sent": self.meter.sent_ns[-1]}  # fmt: skip

    def profile(self, steps: int, apart: int) -> list[Span]:
        """The spans of a round: `steps` as a server runs them, then `apart` taken apart."""
        found, round_ = self.run(steps, apart)
        for row in round_.table.tolist():
            self.spans.append(Span(ENGINE, "decode", row[RECEIVED], row[DECODED]))
            self.spans.append(Span(ENGINE, "process", row[DECODED], row[PROCESSED]))
        for span in found.spans:
            self.spans.append(Span(RING, "ring", span["sent"], span["received"]))
            self.steps.append((span["begin"], max(span["processed"], span["published"])))
        return self.spans


def main(arguments: list[str]) -> int:
    """Write the trace and the picture; exit status 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    options = parser.parse_args(arguments)
    outputs.check_plots(options.out)
    setup = setups(quick=True)[0]
    machine = files.environment()
    spans, step, operations = record(setup)
    trace = options.out / "trace.json"
    first = min(span.begin for span in spans)
    content = {
        "traceEvents": list(trace_events(spans, operations, first)),
        "displayTimeUnit": "ms",
        "otherData": machine | {"setup": setup.name, "requests": setup.requests},
    }
    trace.write_text(json.dumps(content) + "\n")
    from bench.loop import timeline_picture  # matplotlib: only for the picture

    picture = options.out / "timeline.png"
    title = f"{setup.requests} requests at K = 20, {setup.name}"
    timeline_picture.draw(spans, step, title, picture)
    print(f"wrote {trace}: open it at https://ui.perfetto.dev\nwrote {picture}")
    return 0


def record(
    setup: Setup, compiled: Compiled | None = None
) -> tuple[list[Span], tuple[int, int], list[DeviceEvent]]:
    """The spans of a round at K = 20, a typical step taken apart, and the device's operations."""
    params, model = setup.load()
    config = setup.loop_config(model)
    contender = next(one for one in GREEDY if one.name == K20)
    consumer = Consumer([contender.transport], setup.requests)
    try:
        rig = ProfiledRig(
            contender, config, params, compiled or Compiled(config), consumer, setup.prompts(model)
        )
        rig.run(2, 2)  # compiles
        rig.spans.clear()
        with recorded() as operations:
            spans = rig.profile(min(setup.steps, 8), 4)
    finally:
        consumer.close()
    first = min(span.begin for span in spans)
    inside = [one for one in operations if one.begin >= first]
    typical = sorted(rig.steps, key=lambda step: step[1] - step[0])[(len(rig.steps) - 1) // 2]
    return spans, typical, inside
