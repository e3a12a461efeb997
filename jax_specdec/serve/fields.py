"""The fields of a request's body, as JSON schemas: what is served, and what is not yet.

The server publishes these schemas (`openapi.py`) and checks bodies by them (`checks.py`).

Sources: https://platform.openai.com/docs/api-reference, and for what goes beyond it
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from typing import Any

from ipc.wire import MAX_CHOSEN, MAX_TOP_K, LogprobsMode
from jax_specdec import requests

Schema = dict[str, Any]

MAX_STOPS = 16
MAX_STOP = 256  # characters of one: each step looks for its beginnings
MAX_WORDS = 1024  # of a choice
MAX_TOOLS = 128
MAX_CHOICES = 128  # of one HTTP request: its prompts, each `n` times

_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": requests.MAX_TOKEN_ID}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID}
_TEXT = {"type": "string"}
_OBJECT: Schema = {"type": "object"}  # any
_SWITCH = {"type": "boolean", "default": False}
_TOP_K = {"type": "integer", "minimum": 0, "maximum": MAX_TOP_K}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP}


def _whole(low: int, high: int, default: int | None = None) -> Schema:
    given = {} if default is None else {"default": default}
    return {"type": "integer", "minimum": low, "maximum": high} | given


def _closed(*required: str, **properties: Schema) -> Schema:
    """An object of these properties and no others."""
    needed = {"required": [*required]} if required else {}
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | needed


def _number(low: float, high: float, default: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high, "default": default}


# A value of None (null) is that of a field which is left out, everywhere.
COMMON: dict[str, Schema] = {
    "model": _TEXT,
    "n": _whole(1, MAX_CHOICES, 1),
    "seed": _whole(-(2**63), 2**64 - 1),  # it counts modulo 2**32
    "temperature": _number(0, requests.MAX_TEMPERATURE, 1.0),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 1.0},
    "top_k": _whole(-1, 2**31 - 1, 0),
    "min_p": _number(0, 1, 0.0),
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]},
    "stop_token_ids": _TOKEN_IDS | {"maxItems": requests.MAX_HELD_IDS},
    "include_stop_str_in_output": _SWITCH,
    "ignore_eos": _SWITCH,
    "stream": _SWITCH,
    "stream_options": _closed(include_usage=_SWITCH),
    "presence_penalty": _number(-requests.MAX_PENALTY, requests.MAX_PENALTY, 0.0),
    "frequency_penalty": _number(-requests.MAX_PENALTY, requests.MAX_PENALTY, 0.0),
    "repetition_penalty": _number(
        requests.MIN_REPETITION_PENALTY, requests.MAX_REPETITION_PENALTY, 1.0
    ),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {
            "type": "number",
            "minimum": -requests.MAX_BIAS_SIZE,
            "maximum": requests.MAX_BIAS_SIZE,
        },
        "maxProperties": requests.MAX_BIASED_IDS,
    },
    "min_tokens": _whole(0, 2**31 - 1, 0),
    "user": _TEXT,
    "response_format": _closed(
        "type",
        type={"enum": ["text", "json_object", "json_schema"]},
        json_schema=_closed("name", name=_TEXT, description=_TEXT, schema=_OBJECT, strict=_SWITCH),
    ),
    "structured_outputs": _closed(
        json={"anyOf": [_TEXT, _OBJECT]},
        json_object=_SWITCH,
        regex=_TEXT,
        choice={"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_WORDS},
        grammar=_TEXT,
    ),
    "priority": _whole(-(2**31), 2**31 - 1, 0),
    # Beyond OpenAI's: vLLM's names where it has them.
    "prompt_logprobs": _TOP_K,
    "return_token_ids": _SWITCH,
    "extra_token_ids": _TOKEN_IDS | {"maxItems": MAX_CHOSEN},
    "logprobs_mode": {"enum": [mode.name.lower() for mode in LogprobsMode], "default": "raw"},
    "draft_logprobs": _SWITCH,
    "kept_token_ids": _SWITCH,
    "speculation": _SWITCH,
    "logprobs_columns": _SWITCH,
}

COMPLETION: dict[str, Schema] = {
    "prompt": {
        "anyOf": [
            _TEXT,
            {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
            _TOKEN_IDS | {"minItems": 1},
            {
                "type": "array",
                "items": _TOKEN_IDS | {"minItems": 1},
                "minItems": 1,
                "maxItems": MAX_CHOICES,
            },
        ]
    },
    "max_tokens": _whole(0, 2**31 - 1, 16),
    "echo": _SWITCH,
    "logprobs": _TOP_K,
    **COMMON,
}

_PART = _closed("type", "text", type={"enum": ["text"]}, text=_TEXT)
_FUNCTION = {"enum": ["function"]}
_CALL = _closed(
    "function",
    id=_TEXT, type=_FUNCTION, index=_whole(0, MAX_TOOLS),
    function=_closed("name", "arguments", name=_TEXT, arguments=_TEXT),
)  # fmt: skip
_NAME = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[a-zA-Z0-9_-]+$"}
_DESCRIBED = _closed("name", name=_NAME, description=_TEXT, parameters=_OBJECT, strict=_SWITCH)
_TOOL = _closed("type", "function", type=_FUNCTION, function=_DESCRIBED)
_TOOL_CHOICE = _closed("type", "function", type=_FUNCTION, function=_closed("name", name=_TEXT))
_MESSAGE = _closed(
    "role",
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content={"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]},
    name=_TEXT,
    refusal=_TEXT,
    tool_calls={"type": "array", "items": _CALL, "minItems": 1, "maxItems": MAX_TOOLS},
    tool_call_id=_TEXT,
)

CHAT: dict[str, Schema] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "max_tokens": _whole(1, 2**31 - 1),
    "max_completion_tokens": _whole(1, 2**31 - 1),
    "logprobs": _SWITCH,
    "top_logprobs": _TOP_K,
    "tools": {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS},
    "tool_choice": {"anyOf": [_TOOL_CHOICE, {"enum": ["none", "auto", "required"]}]},
    "parallel_tool_calls": _SWITCH | {"default": True},
    **COMMON,
}

# Not served yet: only the value that changes nothing is taken.
NEUTRAL: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",)}


def body_schema(fields: dict[str, Schema], required: str) -> Schema:
    """The schema of a whole body, for a description of the server."""
    properties = {name: _or_null(schema, name == required) for name, schema in fields.items()}
    neutral = {name: {"enum": [*values, None]} for name, values in NEUTRAL.items()}
    return {
        "type": "object",
        "properties": properties | neutral,
        "required": [required],
        "additionalProperties": False,
    }


def _or_null(schema: Schema, required: bool) -> Schema:
    if required:
        return schema
    given = {key: schema[key] for key in ("default",) if key in schema}
    return {
        "anyOf": [{k: v for k, v in schema.items() if k != "default"}, {"type": "null"}]
    } | given
