"""The server against its own description: schemathesis makes requests from it, right and wrong.

    python -m tests.heavy.openapi_contract [EXAMPLES]

Every answer must have a status, a type and a shape that the description has for it; no request may
end in an error of the server, and none that the description rules out may be accepted.
https://schemathesis.readthedocs.io
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.http_server import serving

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,"
    "unsupported_method,missing_required_header"
)


def main(examples="200"):
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    with serving(max_waiting=100_000) as server:
        return subprocess.run(
            [
                program, "run", f"{server.url}/openapi.json", "--checks", CHECKS,
                "--max-examples", examples, "--phases", "examples,coverage,fuzzing",
                "--generation-database", "none", "--seed", "1", "--request-timeout", "60",
            ],
            check=False,
        ).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
