"""The server against its own description: schemathesis makes requests from it, right and wrong.

    python -m tests.heavy.openapi_contract [EXAMPLES [EXAMPLES OF A REAL WORKER]]

First the server is tried over a scripted worker, then over a real one, which no request may end.
Every answer must have a status, a type and a shape that the description has for it; no request may
end in an error of the server, and none that the description rules out may be accepted.
https://schemathesis.readthedocs.io
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx

from tests.support import quick_compile
from tests.support.http_server import serving
from tests.support.served_process import served

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,"
    "unsupported_method,missing_required_header"
)


def tried(url, examples, phases, timeout):
    """Let schemathesis ask; its exit status."""
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    return subprocess.run(
        [
            program, "run", f"{url}/openapi.json", "--checks", CHECKS,
            "--max-examples", examples, "--phases", phases,
            "--generation-database", "none", "--seed", "1", "--request-timeout", timeout,
        ],
        check=False,
    ).returncode  # fmt: skip


def main(examples="200", real="20"):
    with serving(max_waiting=100_000) as server:
        status = tried(server.url, examples, "examples,coverage,fuzzing", "60")
    # Every new combination of what is asked for is compiled: as cheaply as possible.
    environment = os.environ | {"XLA_FLAGS": quick_compile.FLAGS}
    with served("--slots", "2", "--max-length", "64", env=environment) as server:
        status = tried(server.url, real, "fuzzing", "300") or status
        page = httpx.get(f"{server.url}/metrics", timeout=60).text
    (restarts,) = [line for line in page.splitlines() if "worker_restarts_total{" in line]
    print(restarts)
    return status or int(not restarts.endswith(" 0.0"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
