"""Bodies of conversations to the ids that a model's own chat template makes of them."""

import functools

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models

from jax_specdec.serve import tools
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.errors import ApiError
from jax_specdec.serve.model import directory_model
from jax_specdec.serve.parse_request import parse_chat, parse_completion
from tests.support import chat_templates as templates
from tests.support.tokenizer_kinds import KINDS, write

USER = {"role": "user", "content": "Hi"}
PAINT = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}
CALL = {"id": "a1B2c3D4e", "type": "function", "function": {"name": "paint", "arguments": ""}}
RESULT = {"role": "tool", "content": "red", "tool_call_id": "a1B2c3D4e"}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    def make(kind, template, **options):
        ends = {"mistral": ("<s>", "</s>"), "gemma": ("<bos>", "<eos>")}.get(kind, ("", ""))
        special = {
            f"{name}_token": one for name, one in zip(("bos", "eos"), ends, strict=True) if one
        }
        directory = write(tmp_path_factory.mktemp("model"), KINDS[kind](), template, **special)
        return directory_model(directory, None, name="m", created=1, max_length=4000, **options)

    return make


def text_of(model, messages, **more):
    """The prompt of a body, special tokens by their names."""
    (request,) = parse_chat(
        {"messages": messages, "max_tokens": 1} | more, model, Bounds()
    ).requests
    return "".join(map(model.table.text.__getitem__, request.prompt_token_ids))


def refusal(model, messages, **more):
    with pytest.raises(ApiError) as raised:
        text_of(model, messages, **more)
    return raised.value.status, raised.value.param, raised.value.message


@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments, model_of):
    function = CALL["function"] | {"arguments": arguments}
    messages = [USER, {"role": "assistant", "tool_calls": [CALL | {"function": function}]}, RESULT]
    text = text_of(model_of("qwen", templates.QWEN), messages)
    assert '<tool_call>\n{"name": "paint", "arguments": {}}\n</tool_call>' in text


def test_what_a_template_raises_is_the_requests_error(model_of):
    model = model_of("qwen", "{{ raise_exception('no') }}")
    status, param, message = refusal(model, [USER])
    assert (status, param) == (400, "messages")
    assert message.endswith("no")


def test_names_of_calls_fit_mistrals_templates(model_of):
    names = {tools.call_id() for _ in range(100)}
    assert len(names) == 100
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in names)
    reader = tools.CallReader()
    _, call = reader.push(
        '<tool_call>\n{"name": "paint", "arguments": {}}\n</tool_call>', over=True
    )
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [USER, answer, RESULT | {"tool_call_id": call["id"]}]
    text = text_of(model_of("mistral", templates.MISTRAL), messages, tools=[PAINT])
    assert "[TOOL_RESULTS]red[/TOOL_RESULTS]" in text


@pytest.mark.parametrize(
    ("parameters", "field", "said"),
    [
        ({"x-guidance": 1}, "tools", "are no JSON schema: x-guidance = 1 must be an object"),
        ({"type": "object", "properties": {"a": functools.reduce(
            lambda inner, _: {"items": inner}, range(5000), {})}}, "messages", "nested too deep"),
    ],
)  # fmt: skip
def test_parameters_that_no_grammar_can_be_made_of_are_refused(parameters, field, said, model_of):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    model = model_of("mistral", "{{ messages[0].content }}")
    status, param, message = refusal(model, [USER], tools=[tool])
    assert (status, param) == (400, field)
    assert said in message


def test_what_a_template_may_look_at_comes_from_the_body(model_of):
    model = model_of("qwen", templates.QWEN)
    plain = text_of(model, [USER], add_generation_prompt=True, skip_special_tokens=True)
    given = {"enable_thinking": False, "other": ["x"]}
    assert text_of(model, [USER], chat_template_kwargs=given) == f"{plain}<think>\n\n</think>\n\n"
    assert text_of(model, [USER], chat_template_kwargs={"enable_thinking": True}) == plain
    for name in ("messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "self"):
        status, param, _ = refusal(model, [USER], chat_template_kwargs={name: "x"})
        assert (status, param) == (400, "chat_template_kwargs")


def test_prompts_that_the_model_cannot_read_are_refused(tmp_path):
    """A token that it has not, and a text for which the tokenizer has no token at all."""
    made = KINDS["qwen"]()
    made.add_special_tokens(["<image>"])
    write(tmp_path, made)
    known = {"name": "m", "created": 1, "max_length": 100}
    model = directory_model(tmp_path, made.get_vocab_size() - 1, **known)
    words = Library(models.WordLevel({"the": 0, "fox": 1}, unk_token="none"))
    (tmp_path / "words").mkdir()
    lacking = directory_model(write(tmp_path / "words", words), None, **known)
    for one, prompt, said in (
        (model, "a <image>", "the prompt has the token '<image>'"),
        (model, ["a", "<image>"], "the prompt has the token '<image>'"),
        (lacking, "ox", "the tokenizer cannot read this text: "),
    ):
        with pytest.raises(ApiError, match=said) as raised:
            parse_completion({"prompt": prompt}, one, Bounds())
        assert (raised.value.status, raised.value.param) == (400, "prompt")
