"""Files of columns that an interrupted run continues: whole rows, each once."""

import numpy as np
import pytest

from jax_specdec.cli.engine_options import numbers
from jax_specdec.cli.generate_ray import ColumnsOutput, read_table
from jax_specdec.cli.resumable import OutputError
from jax_specdec.export import arrow
from jax_specdec.export.step_rows import step_rows
from jax_specdec.ray.batch import ColumnBatch
from jax_specdec.ray.config import RayConfig
from tests.support.scene import Scene, long_requests, make_requests
from tests.support.scripted_worker import continuation, logprob


def batches_of(requests, replica=0):
    """All that the requests bring, as one batch a step."""
    scene, emitted = Scene(num_slots=8), {}
    for update in scene.generate(requests):
        rows = step_rows(update.records.batches, emitted)
        by_id = {request.id: request for request in requests}
        names = rows.column("request_id").to_pylist()
        yield ColumnBatch(rows, [by_id[name] for name in names], replica)


def write(folder, requests, replica=0):
    with ColumnsOutput(folder) as output:
        found = {**output.done}
        digests = {request.id: f"digest of {request.id}" for request in requests}
        output.write(list(batches_of(requests, replica)), digests)
        return found


def check(folder, requests):
    found = arrow.from_sequences(read_table(folder))
    rows = {
        name: (found.of_request(at).token_id.tolist(), found.of_request(at).logprob.tolist())
        for at, name in enumerate(found.request_id.tolist())
    }
    assert len(found.request_id) == len(requests)
    assert rows == {request.id: continuation(request) for request in requests}


def test_a_later_run_finds_what_there_is_and_appends(tmp_path):
    requests = long_requests(6)
    assert write(tmp_path, requests[:2]) == {}
    assert write(tmp_path, requests[2:3]) == {"r0": "digest of r0", "r1": "digest of r1"}
    write(tmp_path, requests[3:], replica=4)
    assert sorted(path.name for path in tmp_path.glob("*.arrows")) == [
        "replica-0.arrows", "replica-4.arrows",
    ]  # fmt: skip
    check(tmp_path, requests)


def test_the_logprobs_of_prompts_are_columns_too(tmp_path):
    """Lists of those that asked; empty for the others, and both kinds may share a file."""
    asked = [request for request in make_requests(20, 1) if request.params.logprobs is not None]
    scored = {r.id for r in asked if r.params.prompt_logprobs is not None}
    write(tmp_path, [r for r in asked if r.id not in scored])
    write(tmp_path, [r for r in asked if r.id in scored])
    check(tmp_path, asked)
    for row in read_table(tmp_path).to_pylist():
        (request,) = [one for one in asked if one.id == row["request_id"]]
        ids, k = list(request.prompt_token_ids), request.params.prompt_logprobs
        n = 0 if k is None else len(ids) - 1
        expected = [[logprob(ids[:at])] + [-9.0] * k for at in range(1, n + 1)]
        assert row["prompt_logprobs"] == expected
        assert row["prompt_token_ranks"] == [1] * n
        assert row["prompt_topk_ids"] == [[0] * (k or 0)] * n
        assert row["prompt_weights_version"] == [0] * n
        assert row["prompt_start"] == min(n, 1)
    assert len(scored) > 2


def test_what_a_crash_left_half_written_is_cut_off(tmp_path):
    requests = long_requests(4)
    write(tmp_path, requests[:2])
    path = tmp_path / "replica-0.arrows"
    whole = path.stat().st_size
    write(tmp_path, requests[2:])
    data = path.read_bytes()
    for size in [*np.linspace(whole + 1, len(data) - 1, 12).astype(int).tolist(), 3, 0]:
        path.write_bytes(data[:size])
        with ColumnsOutput(tmp_path) as output:
            kept = 2 if size > whole else 0
            assert len(output.done) == kept
            assert output.cut == size - (whole if kept else 0)
    write(tmp_path, requests)
    check(tmp_path, requests)


def test_two_writers_and_files_of_others_are_refused(tmp_path):
    with ColumnsOutput(tmp_path), pytest.raises(OutputError, match="another process writes"):
        ColumnsOutput(tmp_path)
    pa = arrow.pyarrow()
    other = pa.table({"x": [1]})
    with pa.ipc.new_stream(str(tmp_path / "replica-1.arrows"), other.schema) as writer:
        writer.write_table(other)
    with pytest.raises(OutputError, match=r"replica-1\.arrows is not of this command"):
        ColumnsOutput(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no file replica"):
        read_table(tmp_path / "nowhere")


def test_devices_are_read():
    assert numbers("GPU=4,CPU=0.5") == {"GPU": 4.0, "CPU": 0.5}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 0}, "replicas = 0 must be from 1 to 65536"),  # others: docs/limits.md
        ({"devices": {"GPU": -1}}, r"devices\['GPU'\] = -1 must be 0 or more"),
        ({"devices": {}}, "names none"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RayConfig(**values)
