"""Checks the values of a report, from its YAML or the command line, against the types of its dataclass.

Checks that need more than a type are those of the dataclass; they rely on these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from infini.errors import InputError, require

NOTATIONS = ("lengths", "input_lengths", "depths")
"""Lists whose entries are checked where their notation is read (infini.config.lengths), which knows what was meant."""


def allowed(what: str) -> dict[str, str]:
    """Metadata of a field: what is said of a value that is not of its type, instead of the name of the type."""
    return {"allowed": what}


def check_types(cls: type, where: str, values: Mapping[str, Any]) -> None:
    """Raise InputError for the first value of another type than the dataclass's field declares.

    where: the key of the whole, for messages. Keys that are no fields are passed over.
    """
    for field, hint in _fields(cls):
        if field.name not in values:
            continue
        key, value = f"{where}.{field.name}", values[field.name]
        if field.name in NOTATIONS:
            shown = value if isinstance(value, str | int | float) else "..."
            require(isinstance(value, list | tuple), key, value, f"must be a list, as [{shown}]")
        elif "allowed" not in field.metadata:
            _check(key, value, hint)
        else:
            try:
                _check(key, value, hint)
            except InputError as error:
                raise InputError(f"{key}={value!r}: {field.metadata['allowed']}") from error


@cache
def _fields(cls: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The fields of a dataclass with their types."""
    hints = get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _check(key: str, value: object, hint: Any) -> None:
    """Raise InputError unless a value is of an annotated type. Lists and groups are checked to their last value."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind = next((kind for kind in kinds if _kind(kind)[0](value)), None)
    require(kind is not None, key, value, f"must be {' or '.join(dict.fromkeys(_kind(kind)[1] for kind in kinds))}")
    inner = get_args(kind)
    if isinstance(value, Mapping) and inner:
        for name, of_name in value.items():
            require(isinstance(name, str), key, value, f"must be {_GROUP}, with names that are strings")
            _check(f"{key}.{name}", of_name, inner[1])
    elif isinstance(value, list | tuple) and inner:
        for item in value:
            _check(key, item, inner[0])


_GROUP = "names with what belongs to each, {a: ..., b: ...}"
_PLAIN: Mapping[Any, tuple[Callable[[object], bool], str]] = {
    Any: (lambda value: True, "a value"),
    type(None): (lambda value: value is None, "null"),
    str: (lambda value: isinstance(value, str), "a string"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: isinstance(value, int) and not isinstance(value, bool), "an integer"),
    float: (
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
        "a finite number",
    ),
}


def _kind(hint: Any) -> tuple[Callable[[object], bool], str]:
    """Whether a value is of a type, without what lies in it, and the name of the type."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin = get_origin(hint)
    if origin is Literal:
        options = get_args(hint)
        return (lambda value: isinstance(value, str) and value in options), " or ".join(options)
    if origin in (list, tuple, Sequence):
        return (lambda value: isinstance(value, list | tuple)), "a list"
    if origin in (dict, Mapping):
        return (lambda value: isinstance(value, Mapping)), _GROUP
    # A row: from a YAML it is a group of keys.
    return (lambda value: isinstance(value, Mapping | hint)), "a group of keys"
