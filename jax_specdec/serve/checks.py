"""Bodies against the classes of `fields.py`, with errors for a person."""

from typing import Any, TypeVar

from pydantic import ValidationError

from jax_specdec.serve.errors import MAX_SHOWN, ApiError, shown, unfit
from jax_specdec.serve.fields import NEUTRAL, Body

Some = TypeVar("Some", bound=Body)


def checked(body: Any, kind: type[Some]) -> Some:
    """The fields of a body.

    Raises:
      ApiError: says which value is wrong, where it stands and what it may be.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {shown(body)}")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        faults = [(_place(detail, body), detail) for detail in error.errors(include_url=False)]
    # Of what a value may be, that is meant which goes furthest.
    place, first = max(faults, key=lambda pair: len(pair[0]))
    why = " or ".join(dict.fromkeys(_why(detail) for where, detail in faults if where == place))
    if not place and first["type"] == "missing":
        raise unfit(str(first["loc"][-1]), why)
    if not place:
        raise unfit(first["ctx"]["name"], why, code="unknown_parameter")
    name, value = place[0], shown(first["input"])
    if name in NEUTRAL:
        takes = shown(NEUTRAL[name])
        why = f"{name} = {value} is not served yet: leave it out (or give {takes})"
        raise unfit(name, why, code="unsupported_value")
    raise unfit(name, f"{'.'.join(place)} = {value}: {why}")


def _place(error: Any, value: Any) -> tuple[str, ...]:
    """Where in a value an error is: pydantic's way there, without the kinds that a value may be."""
    place = []
    for part in error["loc"][:-1] if error["type"] == "missing" else error["loc"]:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            continue
        place.append(str(part)[:MAX_SHOWN])
    return tuple(place)


def _why(error: Any) -> str:
    if error["type"] == "missing":
        return f"{error['loc'][-1]} is missing"
    return _WORDS.get(error["type"], str(error["msg"]))


_WORDS = {  # in place of pydantic's
    "string_unicode": "has half of a surrogate pair: write the character itself",
    "model_type": "Input should be an object",
}
