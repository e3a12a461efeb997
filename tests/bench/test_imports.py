"""The benchmark of imports: it times the statement, and fails where the statement does."""

import os
import subprocess

import pytest

from bench import imports

pytestmark = pytest.mark.fast


def test_the_benchmark_times_the_statement_alone():
    assert imports.seconds("time.sleep(0.05)", os.environ) >= 0.05
    with pytest.raises(subprocess.CalledProcessError):
        imports.seconds("import nothing_of_that_name", os.environ)
