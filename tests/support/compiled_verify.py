"""A process that compiles `verify` as a user's `jax.jit` does, one shape after the other.

    python -m tests.support.compiled_verify B,S,M,V,dtype ...

It prints each shape before its compiler begins, and `compiled` after it: a compiler that aborts
takes the process along, and the last line says of what.
"""

import itertools
import subprocess
import sys

from tests.support.paths import ROOT

ROWS = {"B": range(1, 5), "S": range(2, 6), "M": [*range(1, 10), 64]}
VOCABULARIES = (7, 1032)
DTYPES = ("float32", "bfloat16", "float16")

ABORTED = (1, 3, 8, 7, "float32")  # before no computed row was padded; LLVM of jaxlib 0.10.2


def shapes():
    """Shapes (B, S, M, V, dtype) in which every pair of values occurs, in few of them.

    Without drafts, S = 1, there are no tokens of q: M is that of an empty array, and any stands for
    all.
    """
    drafted = [
        (ROWS["B"][(m + s) % 4], ROWS["S"][s], ROWS["M"][m], VOCABULARIES[(m + s // 2) % 2],
         DTYPES[(m + s) % 3])
        for m, s in itertools.product(range(10), range(4))
    ]  # fmt: skip
    plain = [(b + 1, 1, ROWS["M"][3 * b], VOCABULARIES[b % 2], DTYPES[b % 3]) for b in range(4)]
    return [ABORTED, *drafted, *plain]


def aborted(wanted, environment):
    """Compile all shapes, several to a process; {shape: the end of what its process wrote}."""
    left, found = list(wanted), {}
    while left:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.compiled_verify",
             *(",".join(map(str, shape)) for shape in left)],
            env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        compiled = done.stdout.count("compiled")
        if compiled < len(left):  # else it ended with an error after them
            found[left[compiled]] = f"{done.returncode}: {done.stderr[-400:]}"
        left = left[compiled + 1 :]
    return found


def main():
    import jax

    from jax_specdec.device import Drafts, Sampling, verify
    from jax_specdec.device.drafting import CompactQ

    def of(shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    for text in sys.argv[1:]:
        *sizes, dtype = text.split(",")
        b, s, m, v = map(int, sizes)
        q = CompactQ(of((b, s - 1, m)), of((b, s - 1, m), "float32"))
        drafts = Drafts(of((b, s - 1)), of((b,)), q)
        sampling = jax.eval_shape(lambda b=b: Sampling.greedy(b))
        print(text, flush=True)
        jax.jit(verify).lower(of((b, s, v), dtype), drafts, sampling, of((b,))).compile()
        print("compiled", flush=True)


if __name__ == "__main__":
    main()
