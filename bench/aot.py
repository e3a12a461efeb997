"""Compile programs for chips that this machine need not have, and check the compiler's output.

    python -m bench.aot           the GPU kernels, for an H100 (`bench.aot_gpu`)
    python -m bench.aot check     the programs of check-device, for an H200
    python -m bench.aot linear    `linear_topk_logprobs`, for an H100
    python -m bench.aot tpu       the TPU kernel, for four TPUs
    python -m bench.aot verify    the verification of sampled drafts, for an H100
    python -m bench.aot xla       the XLA implementation, for an A100 and an L40S

Each prints what the compiler made. With `--check`, the exit status is 1 if a limit is broken. Needs
the `aot` extra: jax's CUDA plugin, ptxas and nvdisasm, all ordinary wheels. No driver. `tpu` needs
the `aot-tpu` extra.
"""

import argparse
import importlib
import sys

from pallas_kernels.testing.as_proved import as_proved

CHECKS = ("check", "gpu", "linear", "tpu", "verify", "xla")


def main(arguments: list[str] | None = None) -> int:
    """Compile the programs of one check; exit status 0, or 1 if a checked limit is broken."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given.pop(0) if given and given[0] in CHECKS else "gpu"
    check = importlib.import_module(f"bench.aot_{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.aot {name}",
        description=(check.__doc__ or "").split("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="exit status 1 if a limit is broken")
    for option, settings in getattr(check, "OPTIONS", {}).items():
        parser.add_argument(option, **settings)
    options = parser.parse_args(given)
    with as_proved():  # the programs of a chip that passed the check
        broken: int = check.broken(options)
    print(f"{broken} limits broken")
    return 1 if options.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
