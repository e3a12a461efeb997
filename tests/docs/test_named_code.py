"""What stands in backquotes in docstrings, comments and pages exists: files, paths, identifiers."""

import ast
import builtins
import functools
import re
from pathlib import Path

import pytest

from tests.support.pages import PAGES
from tests.support.paths import ROOT

FOLDERS = ("ipc", "jax_specdec", "pallas_kernels", "bench", "examples", "tests", "docs", ".ci")
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
WORD = re.compile(r"[A-Za-z_]\w*")
FILE = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*|[\w./-]*\w\.(?:py|md|js|c|css)")
NAME = re.compile(r"[A-Za-z_][\w.]*")
COMMENT = re.compile(r"(?:^|  )\s*#.*")
CALL = re.compile(rf"({NAME.pattern})(?:\(.*\))?")  # or the name alone
PLACE = re.compile(rf"({FILE.pattern})::({NAME.pattern})")

# Modules of others, whose names are theirs to keep.
OTHER_MODULES = {"jax", "jnp", "lax", "np", "os", "pl", "plgpu", "pltpu", "torch", "ray"}
# Files and names of others, as texts cite them, and a few that no code spells out.
OTHERS = {
    "FastDeploy": [
        "speculate_logprob_msg.h", "speculate_save_output", "speculate_save_output_with_topk",
        "mtp_save_first_token", "mtp_save_first_token_with_topk", "save_each_rank",
        "index_to_batch_id",
    ],
    "vLLM": [
        "raw_logits", "LogprobsProcessor", "prompt_logprob_start", "prompt_logprob_token_ids",
    ],
    "FlashInfer": [
        "chain_speculative_sampling(draft_probs, draft_token_ids, target_probs)",
        "top_k_top_p_sampling_from_logits", "top_k_renorm_probs", "top_p_renorm_probs", "generator",
        "chunked_lm_head_logprob", "chunked_lm_head_support_kl",
    ],
    "MaxText": ["attend_on_embedding", "create_forward_fn"],
    "tunix": ["TrainExample", "advantages", "ref_per_token_logps", "DistillationTrainer"],
    "verl": ["DataProto", "DataProto.from_single_dict"],
    "tpu-inference": [
        "layers/jax/sample/sampling.py", "test_logprobs_replication.py", "test_sampling.py",
        "test_utils.py", "test_rejection_sampler.py", "test_sampling_metadata.py", "parse_output",
    ],
    "sglang-jax": ["srt/layers/sampler.py"],
    "MiMo": ["model.mtp_layers.0", "MiMoMTPLayers"],
    "transformers": [
        "PreTrainedTokenizerBase", "assistant_model", "prompt_lookup_num_tokens",
        "compute_transition_scores",
    ],
    "llama.cpp": ["rope_freqs"],
    "GPT-2": ["bytes_to_unicode"],
    "lm-evaluation-harness": ["simple_evaluate"],
    "Ray": ["global_state_accessor.cc"],
    "JAX and XLA": [
        "UNCONSTRAINED", "WG_STRIDED", "commit_smem", "TpuInfo", "CheckAlignment",
        "jax_remove_custom_partitioning_ptr_from_cache_key",
        "xla_gpu_enable_dynamic_slice_fusion",
    ],
    "PTX": ["griddepcontrol"],
    "the system": ["ru_nivcsw", "sem_post", "sem_wait", "nohup"],
    "Keep a Changelog": ["Unreleased"],
    # Ours, but made of parts where they come to be.
    "metrics": [
        "surplus_tokens_total", "late_slots_total", "late_drafts_total", "preemptions_total",
        "queue_seconds", "first_token_seconds", "between_tokens_seconds", "ring_latency_seconds",
        "step_seconds", "http_ended_connections_total", "ring_payload_bytes_total",
        "ring_waits_total", "ring_wait_seconds_total",
    ],
    "what check-device writes": ["device-check.md"],
}  # fmt: skip


def files():
    """The checkout's own files."""
    inside = (path for top in FOLDERS for path in (ROOT / top).rglob("*"))
    every = [*inside, *ROOT.glob("*.*"), *ROOT.glob(".github/**/*")]
    return [path for path in every if path.is_file() and "__pycache__" not in path.parts]


def described(source):
    """The words of a Python file's code, and its docstrings and comments with their first lines.

    The words are its identifiers and those of its other strings.
    """
    words, texts, docstrings = set(), [], set()
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node):
            string = node.body[0].value
            docstrings.add(string)
            texts.append((string.lineno, string.value))
        for name in ("id", "attr", "arg", "name", "asname", "module", "rest"):
            if isinstance(value := getattr(node, name, None), str):
                words.update(value.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in docstrings:  # it comes after the node that it describes
                words.update(WORD.findall(node.value))
        elif isinstance(node, ast.Global | ast.Nonlocal):
            words.update(node.names)
    for number, line in enumerate(source.splitlines(), 1):
        if comment := COMMENT.search(line):
            texts.append((number, comment[0]))
    return words, texts


@functools.cache
def read(path):
    """What `described` says of a file; of one that is not Python all words, and no texts."""
    text = path.read_text("utf-8")
    return described(text) if path.suffix == ".py" else (set(WORD.findall(text)), [])


@functools.cache
def tree():
    """The paths below the checkout, and the words of its code."""
    own = Path(__file__).resolve()  # which names what there is not
    code = (".py", ".js", ".c", ".toml", ".yml", "")
    paths, words = set(), set(dir(builtins))
    for path in files():
        paths.add(path.relative_to(ROOT).as_posix())
        if path.suffix in code and path != own:
            words |= read(path)[0]
    return paths, words


@functools.cache
def places():
    """Every end of a path, with or without its suffix: a folder, a module, a file."""
    ends = set()
    for path in tree()[0]:
        parts = path.split("/")
        for start in range(len(parts)):
            for stop in range(start + 1, len(parts) + 1):
                ends.add("/".join(parts[start:stop]))
        ends.add(parts[-1].partition(".")[0])
    return ends


def exists(quoted):
    """Whether what stands in backquotes is there; true of what names no file and no identifier."""
    if any(quoted in names for names in OTHERS.values()):
        return True
    if place := PLACE.fullmatch(quoted):
        path = ROOT / place[1]
        return path.is_file() and set(place[2].split(".")) <= read(path)[0]
    if FILE.fullmatch(quoted):
        return quoted.removeprefix("./").rstrip("/") in places()
    call = CALL.fullmatch(quoted)
    if call is None or call[1].split(".")[0] in OTHER_MODULES:
        return True
    known = tree()[1] | places()
    return all(part in known or not part or len(part) == 1 for part in call[1].split("."))


def gone(text):
    """What a text names and is not there, with the lines where it does."""
    return [
        (text[: match.start()].count("\n") + 1, match[1])
        for match in QUOTED.finditer(text)
        if not exists(match[1])
    ]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_that_a_page_names_exists(page):
    text = re.sub(
        r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), page.read_text("utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )  # fmt: skip
    assert gone(text) == []


@pytest.mark.parametrize(
    "top", ["ipc", "jax_specdec", "pallas_kernels", "bench", "examples", "tests"]
)
def test_the_code_that_docstrings_and_comments_name_exists(top):
    found = [
        f"{path.relative_to(ROOT)}:{line + at - 1}: {name}"
        for path in sorted((ROOT / top).rglob("*.py"))
        for line, text in read(path)[1]
        for at, name in gone(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "name",
    [
        "gone.py", "docs/gone.md", "pallas_kernels/wire.py", "./docs/gone.md", "ipc/gone.js",
        "ipc/gone/", "tests/gone", "ipc/wire.py::gone_name", "ipc/gone.py::fits",
        "ipc/wire.py::Engine", "gone_name", "gone_name(x, k=1)",
        "wire.gone_name", "gone_name.fits", "Engine.gone_name()", "ipc.gone_name",
    ],
)  # fmt: skip
def test_a_name_that_is_gone_is_found(name):
    assert gone(f"A line.\nAnother has `{name}` in it, and `fits`.") == [(2, name)]
    source = f'"""`{name}`."""\n\n\ndef f():\n    """A\n    `{name}`."""\n    # `{name}`\n'
    _, texts = described(source)
    assert [line + at - 1 for line, text in texts for at, _ in gone(text)] == [1, 6, 7]


@pytest.mark.parametrize(
    "name",
    [
        "wire.py", "ipc/wire.py", "docs/wire.md", "./docs/wire.md", "wire", "ipc.wire", "fits",
        "ipc/wire.py::fits", "ipc/wire.py::Field.maximum", "tests/docs/", "wire.fits",
        "Engine.generate", "fits(name, value, field)", "K + 1",
        "jax.no_such_name", "speculate_save_output", "len", "B",
    ],
)  # fmt: skip
def test_a_name_that_is_there_or_another_s_is_not_found(name):
    assert gone(f"It is `{name}`.") == []


def test_names_of_others_are_still_cited():
    texts = [page.read_text("utf-8") for page in TEXTS]
    for path in files():
        if path.suffix == ".py":
            texts += [text for _, text in read(path)[1]]
    cited = "".join(texts)
    unused = {name for names in OTHERS.values() for name in names if f"`{name}`" not in cited}
    assert unused == set()
