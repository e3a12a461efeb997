"""Add the functions of a peer that is installed to those that its adapter was proved with.

    python -m tests.peers.prove DISTRIBUTION [FOLDER VERSION]

Run it once the lane `peers` is green with that version: in the peer's environment, or with the
FOLDER of its package and the VERSION that it is of.
"""

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from jax_specdec.adapters.fingerprint import fingerprint
from jax_specdec.adapters.proved import DATA, folder_of

ADAPTERS = {
    "google-tunix": "tunix",
    "maxtext": "maxtext",
    "sglang-jax": "sglang_jax",
    "tpu-inference": "tpu_inference",
}


def added(peer: dict[str, Any], prints: dict[str, str], version: str) -> dict[str, Any]:
    """The entry of a peer with a version more: of each function it has the fingerprints."""
    functions = {name: dict(known) for name, known in peer["functions"].items() if name in prints}
    functions |= {name: known for name, known in peer["functions"].items() if name not in prints}
    for name, digits in prints.items():
        known = functions.setdefault(name, {})
        known[digits] = sorted({*known.get(digits, ()), version}, key=_numbers)
    return {
        "package": peer["package"],
        "versions": sorted({*peer["versions"], version}, key=_numbers),
        "functions": dict(sorted(functions.items())),
    }


def _numbers(version: str) -> list[int]:
    return [int(part.removeprefix("dev")) for part in version.split(".")]


def main(arguments: list[str]) -> int:
    distribution, *place = arguments
    read = json.loads(DATA.read_text())
    peer = read[distribution]
    folder = Path(place[0]) if place else folder_of(distribution, peer["package"])
    version = place[1] if place else metadata.version(distribution)
    adapter = importlib.import_module(f"jax_specdec.adapters.{ADAPTERS[distribution]}")
    prints = {}
    for name in adapter.FUNCTIONS:
        try:
            prints[name] = fingerprint(folder, name)
        except LookupError as error:
            print(f"{version}: {error}")
    read[distribution] = added(peer, prints, version)
    DATA.write_text(json.dumps(read, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
