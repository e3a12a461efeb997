"""The report of a check of a device: one JSON file after every piece, and one page for a person."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

JSON, PAGE, LOG = "device-check.json", "device-check.md", "device-check.log"
PEERS = "peers"  # the part, as `pallas_kernels.testing.pieces` names it, of other libraries
_SAME = (
    "device",
    "backend",
    "versions",
    "proofs",
)  # what results must share to stand in one report


@dataclass
class Report:
    """Results so far, and the files.

    Attributes:
      folder: of the files.
      ground: what `pallas_kernels.testing.ground` says; the pieces that there are among it.
      toolchain: a line for each thing that was looked for, and notes.
      pieces: by name: `ok`, `seconds`, and `figures` or `error`.
      rehearsed: whether nothing ran on a device.
    """

    folder: Path
    ground: dict[str, Any]
    toolchain: list[str]
    pieces: dict[str, dict[str, Any]] = field(default_factory=dict)
    rehearsed: bool = False

    def resume(self) -> None:
        """Take over what an earlier run on the same device and software found.

        What it found with `--full` counts without it too: those pieces are this run's from then on.
        """
        try:
            earlier = json.loads((self.folder / JSON).read_text())
            if all(earlier["ground"][name] == self.ground[name] for name in _SAME):
                for part, names in self.ground["pieces"].items():
                    of_full = self.ground.get("full", {}).get(part, ())
                    names += [x for x in of_full if x in earlier["pieces"] and x not in names]
                listed = {name for names in self.ground["pieces"].values() for name in names}
                self.pieces = {k: v for k, v in earlier["pieces"].items() if k in listed}
        except (OSError, ValueError, LookupError, TypeError):
            return  # none, or that of something else: it is written over

    def todo(self) -> Iterator[list[str]]:
        """The pieces that are left, a list for each process.

        First each kernel's first piece, then each one's second; then times, then peers; what failed
        comes last.
        """
        kernels = [names for part, names in self.ground["pieces"].items() if self._is_kernel(part)]
        others = [n for part, n in self.ground["pieces"].items() if not self._is_kernel(part)]
        in_turn = [name for names in zip_longest(*kernels) for name in names if name]
        for names in (in_turn, *others):
            yield [name for name in names if name not in self.pieces]
        yield [name for name, outcome in self.pieces.items() if not outcome["ok"]]

    def _is_kernel(self, part: str) -> bool:
        return part in self.ground["kernels"]

    def add(self, name: str, outcome: dict[str, Any]) -> None:
        """Note what a piece found, and write both files."""
        self.pieces[name] = outcome
        self.save()

    def save(self) -> None:
        """Write both files, each whole or not at all."""
        content = {name: value for name, value in vars(self).items() if name != "folder"}
        content["skipped"] = self.skipped
        for name, text in (
            (JSON, json.dumps(content, indent=1) + "\n"),
            (PAGE, "\n".join(self.page()) + "\n"),
        ):
            new = self.folder / f"{name}.new"
            new.write_text(text, encoding="utf-8")
            new.replace(self.folder / name)

    @property
    def skipped(self) -> list[str]:
        """Pieces that were not tried."""
        all_names = (name for names in self.ground["pieces"].values() for name in names)
        return [name for name in all_names if name not in self.pieces]

    @property
    def failed(self) -> list[str]:
        """Pieces that failed, hung, or took their process along; not those of other libraries."""
        peers = self.ground["pieces"].get(PEERS, ())
        return [n for n, outcome in self.pieces.items() if not outcome["ok"] and n not in peers]

    def jobs(self) -> tuple[set[str], set[str]]:
        """The jobs of kernels all of whose pieces passed, and those of which one failed."""
        passed, failed = set(), set()
        for proof in self.ground.get("proofs", ()):
            names = [name for part in proof["parts"] for name in self.ground["pieces"][part]]
            if any(name in self.failed for name in names):
                failed.add(proof["job"])
            elif names and all(name in self.pieces for name in names):
                passed.add(proof["job"])
        return passed, failed

    def verdicts(self) -> Iterator[tuple[str, str, int, int]]:
        """Each kernel, its verdict, and how many of its pieces ran, of how many."""
        for part, names in self.ground["pieces"].items():
            if not self._is_kernel(part):
                continue
            ran = [self.pieces[name] for name in names if name in self.pieces]
            word = "PASS" if ran and all(outcome["ok"] for outcome in ran) else "FAIL"
            yield self.ground["kernels"][part], word if ran else "NOT RUN", len(ran), len(names)

    def line(self) -> str:
        """The line that a person can send back."""
        versions = self.ground["versions"]
        words = [verdict for _, verdict, _, _ in self.verdicts()]
        bad = [kernel for kernel, verdict, _, _ in self.verdicts() if verdict == "FAIL"]
        text = (
            f"jax-specdec {versions['jax-specdec']} check-device: {self.ground['device']}, "
            f"{self.ground['backend']}, jax {versions['jax']}: {words.count('PASS')} of "
            f"{len(words)} kernels pass"
        )
        text += f"; FAIL: {', '.join(bad)}" if bad else ""
        text += f"; {len(self.failed)} of {len(self.pieces)} pieces failed"
        text += f", {len(self.skipped)} skipped" if self.skipped else ""
        for name, outcome in self.pieces.items():
            if name.startswith("times: topk") and outcome["ok"] and not self.rehearsed:
                us = next(iter(outcome["figures"]["us"].values()))
                text += f"; {name.removeprefix('times: ')}: {us:g} us"
                break
        return ("REHEARSED, nothing was measured: " if self.rehearsed else "") + text

    def page(self) -> Iterator[str]:
        """The lines of the page, in Markdown."""
        yield f"# Check of {self.ground['device']}\n"
        yield f"Send this line back: `{self.line()}`\n"
        yield "| kernel | verdict | pieces |\n| --- | --- | --- |"
        for kernel, verdict, ran, number in self.verdicts():
            yield f"| {kernel} | {verdict} | {ran} of {number} |"
        for name in self.failed:
            yield f"\n**FAILED** {name}: {self.pieces[name]['error']}"
        yield from self._times()
        if self.skipped:
            yield "\n## Skipped\n\nThe same command goes on with these:\n"
            yield from (f"- {name}" for name in self.skipped)
        yield "\n## Where it ran\n"
        yield from (f"- {line}" for line in self.toolchain)
        yield f"- compute capability: {self.ground['compute capability']}"
        yield from (f"- {name} {version}" for name, version in self.ground["versions"].items())

    def _times(self) -> Iterator[str]:
        """The table of times, with what was not timed, and why."""
        rehearsed = " Of a rehearsal on a CPU: they say nothing." if self.rehearsed else ""
        yield f"\n## Times\n\nMicroseconds a call, medians of rounds.{rehearsed}\n"
        yield "| call | contender | us | least to most | against the first |"
        yield "| --- | --- | --- | --- | --- |"
        first: dict[str, float] = {}  # by call
        for name, outcome in self.pieces.items():
            *_, call = name.split(": ")
            figures = outcome.get("figures") or {}
            for who, us in figures.get("us", {}).items():
                low, high = figures["spread"][who]
                base = first.setdefault(call, us)
                ratio = f"{us / base:.2f}x" if base else ""
                yield f"| {call} | {who} | {us:g} | {low:g} to {high:g} | {ratio} |"
            for who, why in figures.get("absent", {}).items():
                yield f"| {call} | {who} | NOT RUN: {_cell(why)} | | |"
            if "GB/s" in figures:
                who = next(iter(figures["us"]))
                yield f"| {call} | read by {who} | {figures['GB/s']} GB/s | | |"
            if not outcome["ok"] and name in self.ground["pieces"].get(PEERS, ()):
                who = name.split(": ")[1]
                yield f"| {call} | {who} | NOT RUN: {_cell(outcome['error'])} | | |"
        for who, module in self.ground["missing"].items():
            if module:
                yield f"| | {who} | NOT INSTALLED: {module} | | |"


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
