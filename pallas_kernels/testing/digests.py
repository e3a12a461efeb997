"""The digests of all kernels as they are, by job, as JSON: `jax-specdec doctor` reads them.

python -m pallas_kernels.testing.digests
"""

import json
import sys

from pallas_kernels.backends import proved


def digests() -> dict[str, dict[str, str]]:
    """{backend: {job: digest}}."""
    return {
        backend: {job: proved.kernel_digest(backend, job) for job in jobs}
        for backend, jobs in proved.JOBS.items()
    }


if __name__ == "__main__":
    print(json.dumps(digests()))
    sys.exit(0)
