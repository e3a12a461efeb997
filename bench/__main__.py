"""`python -m bench SUITE`: run a suite, print its table, write its JSON."""

import argparse
import importlib
import sys
from pathlib import Path

from bench.timing import Comparison, print_table, write_json

SUITES = {
    "kernels": "top-K logprobs of the logits, against log_softmax + top_k + gather + count",
    "ring": "one message from process to process, against other transports",
    "host": "message bytes to records, against per-token lists and objects",
    "end-to-end": "the whole decoding loop, with and without logprobs",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help="; ".join(f"{name}: {what}" for name, what in SUITES.items()) + " (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="few sizes, a minute in all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        parser.error(f"unknown suite {unknown[0]!r}: choose from {', '.join(SUITES)}")
    comparisons: list[Comparison] = []
    for name in options.suites or SUITES:
        module = importlib.import_module(f"bench.{name.replace('-', '_')}")
        results: list[Comparison] = module.run(quick=options.quick)
        print_table(results)
        comparisons += results
    if options.json:
        write_json(options.json, comparisons)
        print(f"wrote {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
