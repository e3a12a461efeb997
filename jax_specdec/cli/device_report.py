"""The report of a check of a device: one JSON file after every piece, and one page for a person."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JSON, PAGE = "device-check.json", "device-check.md"
SAME = ("device", "backend", "versions")  # what results must share to stand in one report


@dataclass
class Report:
    """What was found so far, and the files.

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
        """Take over what an earlier run on the same device and software found."""
        try:
            earlier = json.loads((self.folder / JSON).read_text())
            if all(earlier["ground"][name] == self.ground[name] for name in SAME):
                known = {name for names in self.ground["pieces"].values() for name in names}
                self.pieces = {k: v for k, v in earlier["pieces"].items() if k in known}
        except (OSError, ValueError, LookupError, TypeError):
            return  # none, or that of something else: it is written over

    def todo(self) -> Iterator[tuple[str, list[str]]]:
        """Parts with the pieces that are left: first those never tried, then those that failed."""
        for tried in (False, True):
            for part, names in self.ground["pieces"].items():
                left = [
                    name
                    for name in names
                    if (name in self.pieces) is tried and not (tried and self.pieces[name]["ok"])
                ]
                if left:
                    yield part, left

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Note what a piece found, and write both files."""
        self.pieces[name] = found
        self.save()

    def save(self) -> None:
        """Write both files, each whole or not at all."""
        content = {
            "ground": self.ground,
            "toolchain": self.toolchain,
            "rehearsed": self.rehearsed,
            "pieces": self.pieces,
            "skipped": self.skipped,
        }
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
        every = (name for names in self.ground["pieces"].values() for name in names)
        return [name for name in every if name not in self.pieces]

    @property
    def failed(self) -> list[str]:
        """Pieces that failed, hung, or took their process along."""
        return [name for name, found in self.pieces.items() if not found["ok"]]

    def verdicts(self) -> Iterator[tuple[str, str, int, int]]:
        """Each kernel, its verdict, and how many of its pieces ran, of how many."""
        for part, names in self.ground["pieces"].items():
            if part not in self.ground["kernels"]:
                continue
            ran = [self.pieces[name] for name in names if name in self.pieces]
            word = "PASS" if ran and all(one["ok"] for one in ran) else "FAIL"
            yield self.ground["kernels"][part], word if ran else "NOT RUN", len(ran), len(names)

    def line(self) -> str:
        """What a person can send back."""
        versions = self.ground["versions"]
        words = [verdict for _, verdict, _, _ in self.verdicts()]
        bad = [kernel for kernel, verdict, _, _ in self.verdicts() if verdict == "FAIL"]
        said = (
            f"jax-specdec {versions['jax-specdec']} check-device: {self.ground['device']}, "
            f"{self.ground['backend']}, jax {versions['jax']}: {words.count('PASS')} of "
            f"{len(words)} kernels pass"
        )
        said += f"; FAIL: {', '.join(bad)}" if bad else ""
        said += f"; {len(self.failed)} of {len(self.pieces)} pieces failed"
        said += f", {len(self.skipped)} skipped" if self.skipped else ""
        for name, found in self.pieces.items():
            if (us := (found.get("figures") or {}).get("us")) and "topk_logprobs" in name:
                first = next(iter(us))
                said += f"; {name.removeprefix('times: ')}: {us[first]:g} us"
                break
        return ("REHEARSED, nothing was measured: " if self.rehearsed else "") + said

    def page(self) -> Iterator[str]:
        """The lines of the page, in Markdown."""
        yield f"# Check of {self.ground['device']}\n"
        yield f"Send this line back: `{self.line()}`\n"
        yield "| kernel | verdict | pieces |\n| --- | --- | --- |"
        for kernel, verdict, ran, number in self.verdicts():
            yield f"| {kernel} | {verdict} | {ran} of {number} |"
        for name in self.failed:
            yield f"\n**FAILED** {name}: {self.pieces[name]['error']}"
        timed = {
            name: found["figures"] for name, found in self.pieces.items() if found.get("figures")
        }
        if timed:
            yield "\n## Times\n\nMicroseconds a call, by the device: medians of rounds.\n"
            yield "| call | contender | us | least to most | against the first |"
            yield "| --- | --- | --- | --- | --- |"
        absent: dict[str, str] = {}
        for name, figures in timed.items():
            us = figures["us"]
            first = next(iter(us))
            for who, value in us.items():
                low, high = figures["spread"][who]
                ratio = f"{value / us[first]:.2f}x" if us[first] else ""
                yield f"| {name} | {who} | {value:g} | {low:g} to {high:g} | {ratio} |"
            yield f"| {name} | read by {first} | {figures['GB/s']} GB/s | | |"
            absent |= figures["absent"]
        for who, why in absent.items():
            yield f"\n{who}: {why}"
        if self.skipped:
            yield "\n## Skipped\n\nThe same command goes on with these:\n"
            yield from (f"- {name}" for name in self.skipped)
        yield "\n## Where it ran\n"
        yield from (f"- {line}" for line in self.toolchain)
        yield f"- compute capability: {self.ground['compute capability']}"
        yield from (f"- {name} {version}" for name, version in self.ground["versions"].items())
