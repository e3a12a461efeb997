"""The server's description of itself, in OpenAPI 3.1.

https://spec.openapis.org/oas/v3.1.0
"""

from collections.abc import Iterable
from typing import Any

from jax_specdec.serve.bounds import BODIES, MAX_HEAD, MAX_HEADERS, MAX_URL, Bounds
from jax_specdec.serve.fields import CHAT, COMPLETION, Schema, body_schema

_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_MEANINGS = {
    400: "a field is wrong, missing or not served",
    401: "the key is missing or wrong",
    404: "the model is not served here",
    405: "the method is not served",
    408: "the body did not come in time",
    413: "the body is too large",
    414: "the URL is too long",
    415: "the body is not JSON",
    421: "the server is not called so",
    429: "too many requests",
    431: "the head of the request is too large",
    503: "the server cannot serve it now",
    504: "the answer took too long",
}
_OF_HEADS = (414, 421, 431)  # before anything else is looked at
_HEALTH: Schema = {
    "type": "object",
    "properties": {
        "status": {"enum": ["loading", "ready", "draining", "failed"]},
        "problems": {"type": "array", "items": {"type": "string"}},
        "workers": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "string"}},
        },
    },
    "required": ["status", "problems", "workers"],
}
_USAGE = {
    "type": "object",
    "properties": {
        name: {"type": "integer", "minimum": 0}
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    },
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
}


def description(*, keyed: bool, bounds: Bounds, max_length: int) -> dict[str, Any]:
    """The OpenAPI document.

    Args:
      keyed: whether clients below /v1 need a key.
      bounds: the server's.
      max_length: tokens of a request.
    """
    security: dict[str, Any] = {"security": [{"bearer": []}]} if keyed else {}
    paths = {
        "/v1/models": _get("The model that is served.", _object("list"), keyed),
        "/v1/models/{name}": _named_model(keyed),
        "/v1/completions": _post(
            "Text behind a prompt.", body_schema(COMPLETION, "prompt"), "text_completion", "text"
        ),
        "/v1/chat/completions": _post(
            "An answer to messages.", body_schema(CHAT, "messages"), "chat.completion", "message"
        ),
        "/health": _get(
            "Whether requests are served now.",
            _HEALTH,
            False,
            also={503: _HEALTH},
        ),
        "/metrics": _text("Numbers for Prometheus.", "text/plain"),
        "/openapi.json": _get("This description.", {"type": "object"}, False),
    }
    for path, operations in paths.items():
        if path.startswith("/v1"):
            for operation in operations.values():
                operation |= security
    components: dict[str, Any] = {"schemas": {"Error": _ERROR}}
    if keyed:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jax-specdec",
            "version": "1",
            "description": _limits(bounds, max_length),
        },
        "paths": paths,
        "components": components,
    }


def _limits(bounds: Bounds, max_length: int) -> str:
    body = bounds.body_bytes(max_length)
    timeout = "no limit" if bounds.timeout is None else f"{bounds.timeout:g} seconds"
    return (
        f"Limits. A URL: {MAX_URL} bytes. The head of a request: {MAX_HEADERS} headers and "
        f"{MAX_HEAD} bytes. A body: {body} bytes, and {BODIES * body} for all that are on their "
        f"way. Prompt and emitted tokens: {max_length}. Prompt tokens times K times choices, where "
        f"the prompt's logprobs are asked for: {bounds.max_prompt_logprobs}. Sending a head, "
        f"sending a body, reading a part of an answer: {bounds.client_timeout:g} seconds each. An "
        f"answer: {timeout}. Requests at once: {bounds.max_open}. Connections: "
        f"{bounds.max_connections}."
    )


def _post(summary: str, body: Schema, kind: str, said: str) -> dict[str, Any]:
    choice = {
        "type": "object",
        "properties": {
            "index": {"type": "integer"},
            "finish_reason": {"enum": ["stop", "length"]},
            "logprobs": {"type": ["object", "null"]},
        },
        "required": ["index", "finish_reason", "logprobs", said],
    }
    answer = _object(kind)
    answer["properties"] |= {
        "id": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": choice},
        "usage": _USAGE,
    }
    answer["required"] += ["id", "created", "model", "choices", "usage"]
    content = {"application/json": {"schema": answer}, "text/event-stream": {}}
    operation = {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "the answer", "content": content}, **_errors()},
    }
    return {"post": operation}


def _get(
    summary: str, schema: Schema, keyed: bool, also: dict[int, Schema] | None = None
) -> dict[str, Any]:
    responses = {"200": _response("the answer", schema), **_errors(_OF_HEADS)}
    for status, other in (also or {}).items():
        responses[str(status)] = _response("the answer", other)
    if keyed:
        responses["401"] = _response(_MEANINGS[401], {"$ref": "#/components/schemas/Error"})
    return {"get": {"summary": summary, "responses": responses}}


def _named_model(keyed: bool) -> dict[str, Any]:
    operations = _get("The model, by its name.", _object("model"), keyed)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    operations["get"]["parameters"] = [name]
    schema = {"$ref": "#/components/schemas/Error"}
    operations["get"]["responses"]["404"] = _response(_MEANINGS[404], schema)
    return operations


def _text(summary: str, kind: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "the page", "content": {kind: {}}}
    responses = {"200": answer, **_errors(_OF_HEADS)}
    return {"get": {"summary": summary, "responses": responses}}


def _errors(statuses: Iterable[int] = tuple(_MEANINGS)) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {str(status): _response(_MEANINGS[status], schema) for status in statuses}


def _response(said: str, schema: Schema) -> dict[str, Any]:
    return {"description": said, "content": {"application/json": {"schema": schema}}}


def _object(kind: str) -> Schema:
    return {
        "type": "object",
        "properties": {"object": {"const": kind}},
        "required": ["object"],
    }
