"""The fields of a request's body: what is served, and what is not yet.

pydantic checks bodies by these classes (`checks.py`) and describes them (`openapi.py`).

Sources: https://platform.openai.com/docs/api-reference, and for what goes beyond it
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ipc.wire import MAX_CHOSEN, MAX_CHOSEN_OF_ROW, MAX_TOP_K
from jax_specdec import requests
from jax_specdec.serve.errors import MAX_SHOWN, encodable

MAX_STOPS = 16
MAX_STOP = 256  # characters of one: each step looks for its beginnings
MAX_WORDS = 1024  # of a choice
MAX_TOOLS = 128
MAX_CHOICES = 128  # of one HTTP request: its prompts, each `n` times
MAX_INT = 2**31 - 1
MOST_NAMED = 8  # fields of an object that an error lists


def _or_null(schema: dict[str, Any]) -> None:
    """Let the description of a class have null for each field with another default."""
    for name, field in schema["properties"].items():
        if (default := field.get("default")) is not None:
            del field["default"]
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], "default": default}


class Closed(BaseModel):
    """An object of these fields and no others; null is a field that is left out."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, json_schema_extra=_or_null
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        """An object without its nulls, its fields known; anything else as it is."""
        if not isinstance(value, dict):
            return value
        names = [field.alias or name for name, field in cls.model_fields.items()]
        for name, item in value.items():
            if item is not None and name not in names:
                name = encodable(name[:MAX_SHOWN])  # to compare a long one takes long
                near = difflib.get_close_matches(name, names, 1)
                way = "the fields that are stand in /openapi.json"
                if near:
                    way = f"did you mean {near[0]!r}?"
                elif len(names) <= MOST_NAMED:
                    way = f"known are {', '.join(names)}"
                problem = f"'{name}' is not served; {way}"
                raise PydanticCustomError("unknown_parameter", problem, {"name": name})
        return {name: item for name, item in value.items() if item is not None}

    def set_fields(self) -> dict[str, Any]:
        """The fields that are given, in the order of the class."""
        return {name: item for name, item in self if name in self.model_fields_set}


def _few(biases: Any) -> Any:
    """Biases, counted before each is looked at: all that are wrong would be told of."""
    if isinstance(biases, dict) and len(biases) > requests.MAX_BIASED_IDS:
        problem = f"has {len(biases)} entries and may have {requests.MAX_BIASED_IDS}"
        raise PydanticCustomError("too_long", problem)
    return biases


Text = Annotated[str, Field(min_length=0)]  # so pydantic looks for halves of surrogate pairs
Object = dict[str, Any]
TokenId = Annotated[int, Field(ge=0, le=requests.MAX_TOKEN_ID)]
IdRow = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_CHOSEN_OF_ROW, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
Bias = Annotated[float, Field(ge=-requests.MAX_BIAS_SIZE, le=requests.MAX_BIAS_SIZE)]
_Biases = Annotated[
    dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")], Bias],
    Field(max_length=requests.MAX_BIASED_IDS),
    BeforeValidator(_few),
]
_SOME = Field(min_length=1, fail_fast=True)
_PROMPTS = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
_CALLS = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class StreamOptions(Closed):
    include_usage: bool = False
    # Only the value that changes nothing here is taken.
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class JsonSchema(Closed):
    name: Text
    description: Text | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool = False


class ResponseFormat(Closed):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Closed):
    json_: Text | Object | None = Field(None, alias="json")
    json_object: bool = False
    regex: Text | None = None
    choice: list[Text] | None = Field(None, min_length=1, max_length=MAX_WORDS, fail_fast=True)
    grammar: Text | None = None


class Body(Closed):
    """The fields that both formats have."""

    model: Text | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)  # it counts modulo 2**32
    temperature: float = Field(1.0, ge=0, le=requests.MAX_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_INT)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: list[TokenId] = Field([], max_length=requests.MAX_HELD_IDS, fail_fast=True)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(0.0, ge=-requests.MAX_PENALTY, le=requests.MAX_PENALTY)
    frequency_penalty: float = Field(0.0, ge=-requests.MAX_PENALTY, le=requests.MAX_PENALTY)
    repetition_penalty: float = Field(
        1.0, ge=requests.MIN_REPETITION_PENALTY, le=requests.MAX_REPETITION_PENALTY
    )
    logit_bias: _Biases = Field({}, json_schema_extra={"additionalProperties": False})
    min_tokens: int = Field(0, ge=0, le=MAX_INT)
    user: Text | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(0, ge=-(2**31), le=MAX_INT)
    # Beyond OpenAI's: vLLM's names where it has them.
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_K)
    prompt_logprobs_start: int = Field(0, ge=0, le=MAX_INT)
    prompt_extra_token_ids: list[IdRow] | None = Field(None, fail_fast=True)
    return_token_ids: bool = False
    extra_token_ids: list[TokenId] = Field([], max_length=MAX_CHOSEN, fail_fast=True)
    logprobs_mode: Literal["raw", "scaled", "processed"] = "raw"
    draft_logprobs: bool = False
    kept_token_ids: bool = False
    entropy: bool = False
    log_sum_exp: bool = False
    row_digest: bool = False
    speculation: bool = False
    logprobs_columns: bool = False
    # Taken, and of no effect here: who asks, and how requests are told apart.
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    # Not served yet: only the value that changes nothing is taken.
    best_of: float | None = Field(None, ge=1, le=1)
    suffix: str | None = Field(None, max_length=0)
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    metadata: Object | None = Field(None, max_length=0)
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    use_beam_search: Literal[False] | None = None
    early_stopping: Literal[False] | None = None
    length_penalty: float | None = Field(None, ge=1, le=1)


NEUTRAL = {
    "best_of": 1, "suffix": "", "service_tier": "auto", "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "use_beam_search": False, "early_stopping": False,
    "length_penalty": 1.0, "store": False, "metadata": {}, "modalities": ["text"],
    "add_generation_prompt": True, "continue_final_message": False, "verbosity": "medium",
    "functions": [], "function_call": "none",
}  # fmt: skip


class Completion(Body):
    """A body of the completions API."""

    prompt: (
        Text
        | Annotated[list[Text], _PROMPTS]
        | Annotated[list[TokenId], _SOME]
        | Annotated[list[Annotated[list[TokenId], _SOME]], _PROMPTS]
    )
    max_tokens: int = Field(16, ge=0, le=MAX_INT)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_K)


class TextPart(Closed):
    type: Literal["text"]
    text: Text


class CalledFunction(Closed):
    name: Text
    arguments: Text


class ToolCall(Closed):
    id: Text | None = None
    type: Literal["function"] | None = None
    index: int | None = Field(None, ge=0, le=MAX_TOOLS)
    function: CalledFunction


class ChatMessage(Closed):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], _SOME] | None = None
    name: Text | None = None
    refusal: Text | None = None
    tool_calls: Annotated[list[ToolCall], _CALLS] | None = None
    tool_call_id: Text | None = None
    annotations: list[Object] | None = Field(None, max_length=0)  # clients send back what is empty

    @model_validator(mode="before")
    @classmethod
    def _without_calls(cls, value: Any) -> Any:
        """The fields, where an empty list of calls is one that is left out."""
        if isinstance(value, dict) and value.get("tool_calls") == []:
            return {name: item for name, item in value.items() if name != "tool_calls"}
        return value


class DeclaredFunction(Closed):
    name: str = Field(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")
    description: Text | None = None
    parameters: Object | None = None
    strict: bool = False


class Tool(Closed):
    type: Literal["function"]
    function: DeclaredFunction


class ChosenFunction(Closed):
    name: Text


class ToolChoice(Closed):
    type: Literal["function"]
    function: ChosenFunction


class Chat(Body):
    """A body of the chat completions API."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_K)
    tools: list[Tool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Text | None = None  # taken, and of no effect here
    chat_template_kwargs: Object = {}
    # Only the value that changes nothing is taken.
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1)
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    verbosity: Literal["medium"] | None = None
    functions: list[Object] | None = Field(None, max_length=0)
    function_call: Literal["none"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_tools(cls, value: Any) -> Any:
        """The fields, where "auto" without tools is a choice that is left out."""
        chosen = isinstance(value, dict) and value.get("tool_choice") == "auto"
        if not chosen or value.get("tools"):
            return value
        return {name: item for name, item in value.items() if name != "tool_choice"}
