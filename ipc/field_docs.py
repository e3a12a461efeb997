"""Texts of `help` on a named tuple's fields, in place of "Alias for field number".

`pallas_kernels/contract/field_docs.py` has the same function: neither package needs the other.
"""

import inspect
import re
from typing import TypeVar

_Class = TypeVar("_Class", bound=type)
_ENTRY = re.compile(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", re.MULTILINE)


def with_field_docs(cls: _Class) -> _Class:
    """Give each field the text that stands under "Attributes:" in the docstring of its class.

    Several fields may share a text: "low, high: seconds".
    """
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    for names, text in _ENTRY.findall(section):
        for name in names.split(", "):
            getattr(cls, name).__doc__ = " ".join(text.split())
    return cls
