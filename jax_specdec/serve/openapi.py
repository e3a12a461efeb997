"""The server's description of itself, in OpenAPI 3.1.

https://spec.openapis.org/oas/v3.1.0
"""

from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from jax_specdec.serve.bounds import BODIES, MAX_HEAD, MAX_HEADERS, MAX_URL, Bounds
from jax_specdec.serve.fields import Chat, Completion

_Schema = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
_TEXT: _Schema = {"type": "string"}
_TEXT_OR_NULL: _Schema = {"type": ["string", "null"]}


def _object(**properties: _Schema) -> _Schema:
    """An object that has these properties, and perhaps others."""
    return {"type": "object", "properties": properties, "required": [*properties]}


_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL))
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
_HEALTH = _object(
    status={"enum": ["loading", "ready", "draining", "failed"]},
    problems={"type": "array", "items": _TEXT},
    workers={"type": "array", "items": {"type": "array", "items": _TEXT}},
)
_ALIVE = _object(status={"enum": ["alive", "failed"]})
_COUNT: _Schema = {"type": "integer", "minimum": 0}
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)


def description(*, keyed: bool, bounds: Bounds, max_length: int) -> dict[str, Any]:
    """The OpenAPI document.

    Args:
      keyed: whether clients below /v1 need a key.
      bounds: the server's.
      max_length: tokens of a request.
    """
    security: dict[str, Any] = {"security": [{"bearer": []}]} if keyed else {}
    read = (*_OF_HEADS, *((401,) if keyed else ()))
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    page = {"description": "the page", "content": {"text/plain": {}}}
    listed, model = (_response(_object(object={"const": kind})) for kind in ("list", "model"))
    health = _get("Whether requests are served now.", _response(_HEALTH))
    health["get"]["responses"]["503"] = _response(_HEALTH)
    alive = _get("Whether this process should go on.", _response(_ALIVE))
    alive["get"]["responses"]["503"] = _response(_ALIVE)
    bodies = TypeAdapter(Completion | Chat).json_schema(ref_template=f"{_SCHEMAS}{{model}}")
    components: dict[str, Any] = {"schemas": bodies["$defs"] | {"Error": _ERROR}}
    if keyed:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jax-specdec",
            "version": "1",
            "description": _limits(bounds, max_length),
        },
        "paths": {
            "/v1/models": _get("The model that is served.", listed, read, security),
            "/v1/models/{name}": _get(
                "The model, by its name.", model, (*read, 404), security | {"parameters": [name]}
            ),
            "/v1/completions": _post(
                "Text behind a prompt.", "Completion", security, "text_completion", text={}
            ),
            "/v1/chat/completions": _post(
                "An answer to messages.", "Chat", security, "chat.completion", message={}
            ),
            "/health": health,
            "/livez": alive,
            "/metrics": _get("Numbers for Prometheus.", page),
            "/openapi.json": _get("This description.", _response({"type": "object"})),
        },
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


def _post(
    summary: str, body: str, more: dict[str, Any], kind: str, **fields: _Schema
) -> dict[str, Any]:
    choice = _object(
        index={"type": "integer"},
        finish_reason={"enum": ["stop", "length", "tool_calls"]},
        logprobs={"type": ["object", "null"]},
        **fields,
    )
    answer = _object(
        object={"const": kind},
        id=_TEXT,
        created={"type": "integer"},
        model=_TEXT,
        choices={"type": "array", "items": choice},
        usage=_USAGE,
    )
    made = _response(answer)
    made["content"]["text/event-stream"] = {}
    content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{body}"}}}
    request_body = {"requestBody": {"required": True, "content": content}}
    return {"post": _operation(summary, made, _MEANINGS) | more | request_body}


def _get(
    summary: str,
    answer: dict[str, Any],
    errors: Iterable[int] = _OF_HEADS,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {"get": _operation(summary, answer, errors) | (more or {})}


def _operation(summary: str, answer: dict[str, Any], errors: Iterable[int]) -> dict[str, Any]:
    error = {"$ref": f"{_SCHEMAS}Error"}
    refused = {str(status): _response(error, _MEANINGS[status]) for status in errors}
    return {"summary": summary, "responses": {"200": answer, **refused}}


def _response(schema: _Schema, description: str = "the answer") -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
