"""The demo over processes against the demo on one device: `python -m tests.heavy.processes`.

Ids are the same up to the first position whose two largest logits nearly tie (spec: closer than
1e-4); how many such positions were met is printed. Logprobs before it differ by no more.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLOSE = 1e-4
RUNS = {
    "2 x 2 processes": ["--tensor-parallel", "2", "--data-parallel", "2", "--processes"],
    "4 processes": ["--tensor-parallel", "4", "--processes"],
    "2 processes prefill, 2 decode": ["--tensor-parallel", "2", "--disaggregated", "--processes"],
}


def demo(path: Path, *options: str) -> list[dict[str, Any]]:
    """The records of a run whose requests are all greedy."""
    command = [sys.executable, "-m", "jax_specdec.cli.main", "demo", "--k", "2",
               "--temperature", "0", "--json", str(path), *options]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def near_ties(one: dict[str, Any], many: dict[str, Any]) -> int:
    """1 where two records of a request part at a near tie, 0 where they do not part.

    Raises:
      AssertionError: they part elsewhere, or their logprobs differ.
    """
    ids, others = (record["speculation"]["token_ids"] for record in (one, many))
    logprobs, found = (record["choices"][0]["logprobs"] for record in (one, many))
    for at, (token, other) in enumerate(zip(ids, others, strict=True)):
        if token != other:
            first, second = sorted(logprobs["top_logprobs"][at].values(), reverse=True)[:2]
            assert first - second < CLOSE, (one["id"], at, first, second)
            return 1
        difference = logprobs["token_logprobs"][at] - found["token_logprobs"][at]
        assert abs(difference) < CLOSE, (one["id"], at, difference)
    return 0


def main() -> int:
    """Compare all runs; the number of near ties is printed for each."""
    with tempfile.TemporaryDirectory() as folder:
        expected = demo(Path(folder) / "one.jsonl")
        for name, options in RUNS.items():
            found = demo(Path(folder) / "many.jsonl", *options)
            pairs = list(zip(expected, found, strict=True))
            assert all(one["id"] == many["id"] for one, many in pairs)
            ties = sum(near_ties(one, many) for one, many in pairs)
            tokens = sum(len(one["speculation"]["token_ids"]) for one in expected)
            print(f"{name}: {len(pairs)} requests, {tokens} tokens as on one device; "
                  f"{ties} requests part at a near tie", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
