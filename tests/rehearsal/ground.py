"""In place of `pallas_kernels.testing.ground`: every part of the backend that is rehearsed."""

import json
import os

from pallas_kernels.testing import ground, pieces

if __name__ == "__main__":
    backend = os.environ["REHEARSED"]
    parts = [part for part in pieces.parts_of(backend) if part in pieces.CHECK_PARTS]
    print(json.dumps(ground.facts(full=False, rehearsed=(backend, parts))))
