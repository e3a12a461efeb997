"""The command line: what its options do, what it writes, and what it says when it cannot."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from ipc import RingReader, RingWriter, doctor
from jax_specdec.cli import demo_requests
from jax_specdec.cli.main import COMMANDS, main
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.engine.worker_session import Update
from jax_specdec.records import output_processor
from jax_specdec.records.record import Records
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.text import byte_tokens
from tests.support.paths import ROOT
from tests.support.processor_messages import target
from tests.support.processor_messages import tokens as slot


def run(*options):
    return subprocess.run(
        [sys.executable, "-m", "jax_specdec.cli.main", "demo", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("def f(\n\nimport os\\nimport \nwhile True:\n", encoding="utf-8")
    return str(path)


def test_a_run_writes_one_openai_style_record_a_request(prompts, tmp_path):
    path = tmp_path / "out.jsonl"
    done = run("--prompts", prompts, "--k", "2", "--max-tokens", "8", "--drafter", "ngram",
               "--slots", "2", "--json", str(path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for said in ("00", "tokens", "a step", "drafts accepted", "logprob", "are ids, logprobs",
                 "transport latency", "wrote 3 records"):  # fmt: skip
        assert said in done.stdout
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["id"] for record in records] == ["00", "01", "02"]
    assert records[1]["speculation"]["prompt"] == "import os\nimport "
    for record in records:
        (choice,) = record["choices"]
        ids = record["speculation"]["token_ids"]
        assert record["object"] == "text_completion"
        assert record["usage"]["completion_tokens"] == len(ids) <= 8
        assert choice["text"] == byte_tokens.decode(i for i in ids if i < 256)
        assert choice["finish_reason"] in ("length", "stop")
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(ids)
        assert all(len(top) <= 2 for top in logprobs["top_logprobs"])
        assert record["speculation"]["token_ranks"] == [1] * len(ids)  # greedy
        total = sum(logprobs["token_logprobs"])
        assert record["speculation"]["cumulative_logprob"] == pytest.approx(total)


def test_nobody_drafts_and_nobody_asks(prompts, tmp_path):
    path = tmp_path / "out.jsonl"
    done = run("--prompts", prompts, "--no-logprobs", "--max-tokens", "3", "--drafter", "none",
               "--temperature", "0.8", "--json", str(path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert record["choices"][0]["logprobs"] is None
        assert record["speculation"]["cumulative_logprob"] is None
        assert record["speculation"]["temperature"] == 0.8
        assert record["speculation"]["drafts"] == 0


def test_every_behavior_of_the_seed_system_in_one_run(prompts, tmp_path):
    path = tmp_path / "out.jsonl"
    done = run("--prompts", prompts, "--k", "1", "--max-tokens", "12", "--drafts", "2",
               "--slots", "2", "--disaggregated", "--draft-logprobs", "--chunked-prefill", "4",
               "--preempt-every", "4", "--adaptive-drafts", "--json", str(path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if "│" in line}
    decode, prefill = (re.findall(r"[\w,]+", rows[rank]) for rank in "01")
    assert (decode[1], prefill[1]) == ("decode", "prefill")
    assert prefill[5] == "3"  # handed over
    (messages,) = re.findall(r"(\d+) messages,", done.stdout)
    assert int(decode[2]) + int(prefill[2]) == int(messages)
    assert int(decode[6]) > 0  # preempted
    for line in path.read_text().splitlines():
        record = json.loads(line)
        ids = record["speculation"]["token_ids"]
        assert 1 <= len(ids) <= 12
        assert len(record["choices"][0]["logprobs"]["token_logprobs"]) == len(ids)
        steps = record["speculation"]["by_step"]
        assert steps[0]["num_tokens"] == 1
        assert "draft_logprobs" not in steps[1]  # handed over as bare ids
        asked = [step for step in steps[2:] if step["num_drafts"]]
        assert asked
        for step in asked:
            assert len(step["draft_logprobs"]) == step["num_drafts"]
            assert all(value <= 0 for value in step["draft_logprobs"])


@pytest.mark.fast
def test_the_demo_shows_what_it_should():
    requests = demo_requests.default_requests()
    assert len(requests) >= 16
    assert len({len(request.prompt_token_ids) for request in requests}) > 8
    asked = [request.params.logprobs for request in requests]
    assert {None, 0, 20} <= set(asked)
    assert {0.0} < {request.params.temperature for request in requests}


@pytest.fixture
def configured(monkeypatch):
    """The configurations that the demo starts engines with; nothing runs."""
    seen = []
    fake = FakeEngine(lambda: None)

    def start(config):
        seen.append(config)
        return fake

    monkeypatch.setattr("jax_specdec.engine.engine.Engine", start)
    return seen


@pytest.mark.fast
def test_options_reach_the_engine(configured, tmp_path):
    assert main(["demo"]) == 0
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("def f():\n")
    options = ["--drafter", "suffix", "--adaptive-drafts", "--chunked-prefill", "16",
               "--data-parallel", "3", "--disaggregated", "--corpus", str(corpus)]  # fmt: skip
    assert main(["demo", *options]) == 0
    plain, changed = configured
    assert (plain.drafter, plain.adaptive, plain.corpus) == ("mtp", False, "")
    assert (plain.num_ranks, plain.num_prefill_ranks, plain.prefill_chunk) == (1, 0, 64)
    assert (changed.drafter, changed.adaptive, changed.corpus) == ("suffix", True, str(corpus))
    assert (changed.num_ranks, changed.num_prefill_ranks, changed.prefill_chunk) == (3, 1, 16)


@pytest.mark.fast
@pytest.mark.parametrize("choice", ["stop", "restart"])
def test_a_lost_worker_is_spoken_of_once(choice, monkeypatch, capsys):
    """Where the demo goes on, it says so at once; otherwise the error at the end does."""
    lost = WorkerFailed("the model worker of process rank 0 is gone")

    def generate():
        yield Update(None, None, Records(), 0, lost=lost)
        if choice == "stop":
            raise lost

    fake = FakeEngine(lambda: None)
    fake.generate = lambda requests: generate()
    monkeypatch.setattr("jax_specdec.engine.engine.Engine", fake)
    assert main(["demo", "--on-worker-loss", choice]) == (1 if choice == "stop" else 0)
    out, err = capsys.readouterr()
    assert (out + err).count("process rank 0 is gone") == 1


@pytest.mark.fast
@pytest.mark.parametrize("advice", ["EngineConfig(...)", ""])
def test_a_killed_worker_brings_advice_for_the_command_line(advice, capsys, during):
    def lose():
        raise WorkerFailed("the worker is gone", advice)

    during(lose)
    assert main(["demo"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("the worker is gone\n")
    assert ("--on-worker-loss restart" in errors) == bool(advice)
    assert "EngineConfig" not in errors  # nobody can type that here


@pytest.mark.fast
def test_options_change_every_request():
    plain = demo_requests.default_requests()
    assert demo_requests.with_options(plain) == plain
    changed = demo_requests.with_options(plain, k=7, temperature=0.5, max_tokens=9)
    assert {(r.params.logprobs, r.params.temperature, r.params.max_tokens) for r in changed} == {
        (7, 0.5, 9)
    }
    assert {r.params.logprobs for r in demo_requests.with_options(plain, no_logprobs=True)} == {
        None
    }
    drafts = demo_requests.with_options(plain, draft_logprobs=True)
    assert [r.params.draft_logprobs for r in plain + drafts] == [False] * 18 + [True] * 18


@pytest.mark.fast
def test_one_rule_gives_every_request_its_top_p():
    def pairs(requests):
        return {(r.params.temperature > 0, r.params.top_p) for r in requests}

    plain = demo_requests.default_requests()
    assert pairs(plain) == {(False, 1.0), (True, 0.95)}
    assert pairs(demo_requests.with_options(plain, temperature=0.7)) == {(True, 0.95)}
    assert pairs(demo_requests.with_options(plain, temperature=0.0)) == {(False, 1.0)}


@pytest.mark.fast
def test_only_a_line_feed_ends_a_prompt(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("a\fb\r\n\u2028c\x85\u2029d\n \n\\n\\t\\\\\re\n".encode())
    prompts = [
        byte_tokens.decode(r.prompt_token_ids[1:]) for r in demo_requests.requests_from_file(path)
    ]
    assert prompts == ["a\fb", "\u2028c\x85\u2029d", "\n\t\\\re"]


@pytest.mark.fast
def test_prompts_that_are_no_text_are_refused_by_their_name(tmp_path, capsys):
    path = tmp_path / "prompts.bin"
    path.write_bytes(b"def\n\xff\xfe")
    assert main(["demo", "--prompts", str(path)]) == 2
    assert f"{path} is not UTF-8 text: byte 0xff at offset 4" in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "temperature = -1.0"),
        (["--corpus", "/dev/null"], "--corpus is for --drafter suffix; mtp looks in no text"),
        (["--prompts", "/nowhere/prompts.txt"], "/nowhere/prompts.txt"),
        (["--prompts", "/dev/null"], "holds no prompts"),
        (["--json", "/nowhere/out.jsonl"], "/nowhere/out.jsonl"),
        (["--weights", "/nowhere/x.safetensors"], "/nowhere/x.safetensors"),
        (["--drafter", "suffix", "--corpus", "/nowhere/text"], "/nowhere/text"),
        (["--max-tokens", str(2**31 - 300), "--slots", str(2**16)], "out of memory: Unable to"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(options, said, monkeypatch, capsys):
    stopped = []
    worker = SimpleNamespace(stop=lambda drain: stopped.append(drain))
    start = functools.partial(Engine, start_worker=lambda *_, **__: worker)  # no process
    monkeypatch.setattr("jax_specdec.engine.engine.Engine", start)
    assert main(["demo", *options]) == 2
    errors = "".join(capsys.readouterr().err.split())
    assert "".join(said.split()) in errors
    assert stopped == [False] * said.startswith("out of memory")


@pytest.mark.fast
def test_doctor_lists_a_living_ring_and_leaves_it_alone(capsys, monkeypatch):
    everything = doctor.find_ring_files  # of other tests, whose leftovers are theirs
    monkeypatch.setattr(
        doctor,
        "find_ring_files",
        lambda: [file for file in everything() if file.creator.pid == os.getpid()],
    )
    with RingReader.create(1, 64) as ring:
        assert main(["doctor", "--remove"]) == 0
        assert ring.name.strip("/") in capsys.readouterr().out
        RingWriter.attach(ring.name).close()


@pytest.mark.fast
@pytest.mark.parametrize("options", [["--drafter", "x"], []])
def test_wrong_usage_is_refused(options, capsys):
    with pytest.raises(SystemExit) as error:
        main(["demo", *options] if options else [])
    assert error.value.code == 2
    assert "usage: jax-specdec" in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drafts", "-1"], "argument --drafts: -1 is below 0"),
        (["--drafts", "65"], "argument --drafts: 65 is above 64"),
        (["--slots", "0"], "argument --slots: 0 is below 1"),
        (["--chunked-prefill", "0"], "argument --chunked-prefill: 0 is below 1"),
        (["--preempt-every", "0"], "argument --preempt-every: 0 is below 1"),
        (["--data-parallel", "65"], "argument --data-parallel: 65 is above 64"),
        (["--k", "200"], "argument --k: 200 is above 128"),
        (["--k", "x"], "argument --k: invalid integer value: 'x'"),
        (["--k", "5", "--no-logprobs"], "--no-logprobs: not allowed with argument --k"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(options, said, capsys):
    with pytest.raises(SystemExit) as error:
        main(["demo", *options])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.fast
def test_the_version_is_that_of_the_project(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"{project['name']} {project['version']}\n"


@pytest.mark.fast
def test_a_checkout_that_is_not_installed_says_its_version_and_where_it_is(capsys, monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"jax-specdec {version} (from {ROOT}, not installed)\n"


@pytest.mark.fast
def test_records_that_do_not_fit_the_disk_are_said_with_the_files_name():
    """Python would report it once more, where nobody catches it, if the file were left open."""
    collector = demo_requests.Collector.of(demo_requests.default_requests())
    with (
        pytest.raises(OSError, match=r"No space left on device: '/dev/full'"),
        demo_requests.open_json(Path("/dev/full")) as file,
    ):
        demo_requests.write_json(file, collector)


@pytest.mark.fast
def test_help_is_worth_reading(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    text = capsys.readouterr().out
    for option in ("--drafter", "--drafts", "--k", "--temperature", "--no-logprobs", "--prompts",
                   "--json", "--slots", "--max-tokens", "--draft-logprobs", "--chunked-prefill",
                   "--disaggregated", "--data-parallel", "--preempt-every", "--adaptive-drafts",
                   "--corpus", "--on-worker-loss"):  # fmt: skip
        assert option in text
    assert "never imports jax" in text


@pytest.mark.fast
def test_two_commands_name_their_drafting_options_alike(capsys):
    named = []
    for command in ("demo", "generate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        options = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
        named.append([one for one in options if re.search("adaptive|draft|corpus", one)])
    demos, generates = named
    assert generates == ["--drafter", "--drafts", "--corpus", "--adaptive-drafts"]
    assert {*demos} == {*generates, "--draft-logprobs"}


@pytest.mark.fast
def test_an_invalid_row_and_minus_infinity_survive_json(tmp_path):
    request = Request(
        id="r", prompt_token_ids=(256, 65), params=SamplingParams(max_tokens=2, logprobs=1)
    )
    state = output_processor.ProcessorState.empty(1)
    state = output_processor.admit(state, 0, 1, request)
    values = [[float("nan"), float("nan")], [-float("inf"), -0.5]]
    message = target(0, slot(200, 66, columns=2, logprobs=values))
    _, records = output_processor.step(state, message)
    collector = demo_requests.Collector.of([request])
    for record in records:
        collector.outputs["r"].add(record)
    with demo_requests.open_json(tmp_path / "r.jsonl") as file:
        demo_requests.write_json(file, collector)
    record = json.loads((tmp_path / "r.jsonl").read_text())
    logprobs = record["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -9999.0]
    assert logprobs["tokens"] == ["bytes:\\xc8", "B"]
    assert record["speculation"]["cumulative_logprob"] is None


class FakeEngine:
    """In place of the engine: `generate` does what a test wants to happen during the work."""

    def __init__(self, generate):
        self._generate = generate

    status = ()

    def __call__(self, config):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, requests):
        self._generate()
        return iter(())


@pytest.fixture
def during(monkeypatch):
    """Let a function run where the engine would."""
    return lambda f: monkeypatch.setattr("jax_specdec.engine.engine.Engine", FakeEngine(f))


@pytest.mark.fast
def test_a_directory_for_json_is_refused_before_the_work(tmp_path, capsys, during):
    during(lambda: pytest.fail("the work began"))
    assert main(["demo", "--json", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.fast
def test_an_old_json_file_is_replaced_only_at_the_end(tmp_path, during):
    path = tmp_path / "out.jsonl"
    path.write_text("old " * 100_000)

    def fail():
        raise ValueError("something")

    during(fail)
    assert main(["demo", "--json", str(path)]) == 2
    assert path.read_text() == "old " * 100_000
    seen = []
    during(lambda: seen.append(path.read_text()))
    assert main(["demo", "--json", str(path)]) == 0
    assert seen == ["old " * 100_000]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 18


@pytest.mark.fast
def test_json_may_go_to_a_device(during):
    during(lambda: None)
    assert main(["demo", "--json", "/dev/null"]) == 0


@pytest.mark.fast
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_work_in_order(number, capfd, during):
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    found = signal.signal(number, usual)  # who runs the tests may ignore it, as nohup does
    after = []

    def hit():
        signal.raise_signal(number)
        after.append("the signal did nothing")

    during(hit)
    try:
        assert main(["demo"]) == 128 + number
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, found)
    assert capfd.readouterr().err == "interrupted: the worker was stopped\n"
    assert after == []


@pytest.mark.fast
def test_a_signal_that_is_ignored_stays_ignored(during):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        during(lambda: signal.raise_signal(signal.SIGHUP))
        assert main(["demo"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.fast
def test_main_runs_in_another_thread_too(during):
    during(lambda: None)
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main(["demo"])))
    thread.start()
    thread.join()
    assert codes == [0]


INTERRUPTED_IMPORT = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from jax_specdec.cli.main import main
sys.exit(main(["demo"]))
"""


@pytest.mark.fast
@pytest.mark.parametrize(
    "module", ["ipc.wire", "numpy", "rich.console", "jax_specdec.engine.engine"]
)
def test_ctrl_c_during_an_import_prints_no_traceback(module):
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.fast
@pytest.mark.parametrize("module", ["cli", *(f"{name}_command" for name in COMMANDS)])
def test_the_module_itself_imports_only_the_standard_library(module):
    code = f"import sys, jax_specdec.{module}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "jax_specdec" in loaded
    assert not loaded & {"numpy", "rich", "ipc", "safetensors"}


@pytest.mark.fast
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: jax-specdec {name}" in text
    assert len(text) > 200
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"    {name} " in capsys.readouterr().out


@pytest.mark.fast
def test_bad_weights_say_only_the_cause(tmp_path, capsys):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"no weights")
    assert main(["demo", "--weights", str(path), "--max-tokens", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "starting the model worker: it imports jax and compiles ...\n"
    assert "exited with status" in captured.err
