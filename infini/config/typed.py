"""Builds dataclasses from mappings: the configuration from what Hydra composes, and reports with their rows from YAML.

A user's mistake is an `InputError` of one line: `<key>=<value!r>: <what is allowed>`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from infini.config.schema import RAW_TEXT_KEYS, LoggerConfig, TaskConfig, groups, schema_of, settings_in
from infini.errors import InputError, did_you_mean, nearest, require

T = TypeVar("T")
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest and the largest normal float32."""
OTHER_NAMES = {"epochs": "steps", "learning_rate": "lr"}
"""What users type -> the key that they mean. Trainings are counted in steps."""
_GROUP = "names with what belongs to each, {a: ..., b: ...}"
_NOUNS: dict[Any, str] = {
    **{int: "an integer", float: "a finite number", bool: "true or false", str: "a string", type(None): "null"},
    **{list: "a list", tuple: "a list", Sequence: "a list", dict: _GROUP, Mapping: _GROUP},
}


@cache
def _fields(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Name -> field of a dataclass, and its type."""
    hints = get_type_hints(cls)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls)}


def build(cls: type[T], values: Mapping[str, Any], group: str = "") -> T:
    """Build a dataclass from the values of its fields by name. group: the key of the whole.

    Raises InputError for an unknown or a missing key, and for a value whose type is not the declared one; its message
    then contains `allowed` from the metadata of the field.
    """
    prefix, fields, made = f"{group}." if group else "", _fields(cls), {}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in fields:
            raise no_such_key(f"{prefix}{key}", value, [f"{prefix}{name}" for name in fields])
    for name, (field, hint) in fields.items():
        key = f"{prefix}{name}"
        if name in values:
            try:
                made[name] = _converted(key, values[name], hint)
            except InputError as error:
                if (allowed := field.metadata.get("allowed")) is None:
                    raise
                raise InputError(f"{key}={values[name]!r}: {allowed}") from error
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise InputError(f"{key}: missing; give it a value")
    return cls(**made)


def _is(value: object, hint: Any) -> bool:
    """Whether a value is of a type, without what lies in it. An int is a float, and a mapping a dataclass."""
    kind = get_origin(hint) or hint
    if kind is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if kind in (int, float):
        number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        return number and (isinstance(value, int) or math.isfinite(value))  # type: ignore[arg-type]
    if kind in (list, tuple, Sequence):
        return isinstance(value, list | tuple)
    return kind is Any or isinstance(value, kind) or (dataclasses.is_dataclass(kind) and isinstance(value, Mapping))


def _arms(hint: Any) -> tuple[Any, ...]:
    """The types of a union; one type is a union of itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _noun(hint: Any) -> str:
    kind = get_origin(hint) or hint
    return " or ".join(get_args(hint)) if kind is Literal else _NOUNS.get(kind, "a group of keys")


def _converted(key: str, value: Any, hint: Any) -> Any:
    """`value` as an annotated type; InputError naming `key` otherwise."""
    kinds = _arms(hint)
    if value == "" and type(None) in kinds and key not in RAW_TEXT_KEYS:
        wanted = "must be a run id or a folder" if key in ("checkpoint", "init_from") else "is empty; give it a value"
        raise InputError(f"{key}='': {wanted}, or null")
    kind = next((kind for kind in kinds if _is(value, kind)), None)
    if kind is None:
        names = list(map(_noun, kinds))
        is_entry = names == ["a list"] and any(_is(value, arm) for arm in _arms(get_args(kinds[0])[0]))
        shown = f", as [{value}]" if is_entry else ""
        raise InputError(f"{key}={value!r}: must be {' or '.join(dict.fromkeys(names))}{shown}")
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        cls: Any = schema_of(key, str(value.get("name"))) if kind in (TaskConfig, LoggerConfig) else kind
        return build(cls, value, key)
    if origin in (dict, Mapping):
        for name in value:
            require(isinstance(name, str), key, value, f"must be {_GROUP}, with names that are strings")
        return {name: _converted(f"{key}.{name}", of, inner[1]) for name, of in value.items()}
    if origin in (list, tuple, Sequence):
        # A message names an entry of a list by its name, or else by its index.
        keys = [f"{key}.{item.get('name', at)}" if isinstance(item, Mapping) else key for at, item in enumerate(value)]
        return (tuple if origin is tuple else list)(map(_converted, keys, value, [inner[0]] * len(value)))
    if kind is float:
        try:
            value = float(value)
        except OverflowError as error:
            raise InputError(f"{key}: a number of {len(str(abs(value))):,} digits is too large") from error
        require(abs(value) <= _LARGEST, key, value, f"must be at most {_LARGEST:g}, the largest of float32")
        whole = value == 0 or abs(value) >= _SMALLEST
        require(whole, key, value, f"is 0 in float32; the smallest positive value is {_SMALLEST:g}")
    return value


class NoSuchKeyError(InputError):
    """A key that does not exist. key: as it was typed. shown: with its value."""

    def __init__(self, key: str, value: object, rest: str) -> None:
        self.key, self.shown = key, f"{key}={value!r}"
        super().__init__(f"{self.shown}: no such key{rest}")


def no_such_key(key: str, value: object, known: Sequence[str]) -> NoSuchKeyError:
    """The error of an unknown key, with the keys beside it and what may be meant."""
    parent, _, last = key.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == parent]
    if not siblings:
        parent, siblings = "", [name for name in known if "." not in name]
    choices = groups()[parent] if parent in ("task", "model", "logger") else []
    same = [name for name in known if "." in name and name.rpartition(".")[2] == last]
    if owners := [name for name in choices if last in settings_in(parent, name)]:
        hint = f"; of {parent}={f', {parent}='.join(owners)}"
    elif key == "report.run":
        hint = "; this report makes all its rows; model= chooses among them"
    elif same:
        hint = f"; did you mean {same[0]!r}?"
    else:
        # Whole keys are not compared with their siblings: their common beginning would make any two look alike.
        hint = did_you_mean(key, [name for name in known if name not in (*siblings, parent)])
        if near := nearest(OTHER_NAMES.get(last, last), [name.rpartition(".")[2] for name in siblings]):
            found = f"{parent}.{near}" if parent else near
            hint = f"; did you mean {found!r}?"
    allowed = ", ".join(sorted(name.rpartition(".")[2] for name in siblings))
    return NoSuchKeyError(key, value, f"{f' of {parent}' if parent else ''}; allowed: {allowed}{hint}")
