"""The protocol of reports: each kind of report is one class that declares its keys and what verbs do with it.

A report is one YAML in `conf/report`. Its kind is the class in `infini.report.load.KINDS` whose `sign` is among its
keys. Values, from the YAML or the command line, are checked against the types of the class; checks that need more than
a type are those of the class and rely on these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from infini.config.schema import OF_REPORTS, PLACES, SHOWN, TRAINED, groups, settings_in
from infini.errors import InputError, did_you_mean, require
from infini.records import value_at
from infini.report.tables import RenderedReport, Table

FINISHED_RUNS = (*OF_REPORTS, "scale", "seed", "results_dir", *SHOWN)
"""Keys of verbs that use finished runs only."""
REPRODUCED = (*OF_REPORTS, *TRAINED, "seed", "plan", "workers", *PLACES, *SHOWN)
"""Keys that `infini reproduce` reads with every report that it can make."""
NOTATIONS = ("lengths", "input_lengths", "depths")
"""Lists whose entries are checked where their notation is read (infini.config.lengths), which knows what was meant."""


@dataclass(frozen=True)
class OwnVerb:
    """What a verb reads and does with one kind of report."""

    patterns: tuple[str, ...] | None
    """Keys that it reads, see infini.config.schema; None: those that the verb declares."""
    never: tuple[str, ...] = ()
    """Keys that it does not read although a pattern covers them."""
    module: str = ""
    """Module with a function of the verb's name that does the work; empty: the verb's own module does it."""


def usual_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of the options with which the model of a configuration is shipped: those of a row that does
    not set them. Without options that the configuration, which may be older, does not have. Of a pretrained model only
    the additions to its memory; none of a base that may have been injected with them."""
    model, found = config.get("model", {}), {}
    shipped = _shipped_options(str(model.get("name")))
    if "base" in model:
        shipped = {key: shipped[key] for key in _ADDITIONS if model["base"] == shipped["base"]}
    for key, value in shipped.items():
        reference = str(value)[2:-1] if str(value).startswith("${") else ""
        usual = value_at(config, reference) if reference else value
        if key in model and not (reference and usual is None):
            found[f"model.{key}"] = usual
    return found


_ADDITIONS = ("memory_decay", "input_gate")


@cache
def _shipped_options(model: str) -> dict[str, Any]:
    return settings_in("model", model)


def values_of(settings: Iterable[str]) -> dict[str, Any]:
    """Dotted key -> value of settings, which are given as the command line takes them. The choice of a group is its
    name."""
    return dict(map(_value_of, settings))


@cache
def _value_of(setting: str) -> tuple[str, Any]:
    """The key and the value of one setting, as Hydra reads it: in YAML, 5e-05 is a text."""
    # It is imported late because Hydra takes a tenth of a second, which help does not need.
    from infini.config.compose import parse_setting

    key, value = parse_setting(setting)
    return f"{key}.name" if key in groups() else key, value


@dataclass(frozen=True, kw_only=True)
class ReportKind:
    """Base of the classes of reports, which are frozen dataclasses. Their fields are the keys of the YAML; keys
    without a default are required."""

    sign: ClassVar[str] = ""
    """A key that every report of this kind has and no other."""
    verbs: ClassVar[Mapping[str, OwnVerb]] = {}
    """Verb -> what is particular to this kind. `reproduce` is among them if something can be run for the report."""
    shows_own_runs: ClassVar[bool] = True
    """Whether its table shows the reader's own runs beside published ones. `make results` renews such tables alone."""

    has_one_seed: ClassVar[bool] = False
    """Whether its table is of the seed that is set. Other kinds take the runs of every seed."""

    name: str
    title: str
    task: str
    """The task of its runs, or of `infini reproduce` if none is named on the command line."""
    note: str = ""
    """Printed below its tables."""

    @property
    def parts(self) -> Sequence[Any]:
        """The report of each task, if the report shows evaluations; empty for other kinds."""
        return ()

    def limited_to(self, models: Sequence[str]) -> Self:
        """The report with the rows of these models alone, if the table shows only what is run. No models: all rows."""
        return self

    def rendered(
        self, scale: str, tables: Iterable[Table], notes: Iterable[str], mark: str = "", **more: Any
    ) -> RenderedReport:
        """These tables at one scale. The report's own note comes before the others. mark: ends the title."""
        title, kept = f"{self.title}, scale {scale}{mark}", tuple(filter(None, (self.note, *notes)))
        return RenderedReport(self.name, scale, title, tuple(tables), kept, **more)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A report from the `report` group of a configuration.

        Raises:
            InputError: a key is missing, unknown or has a value of another type or that is not allowed.
        """
        known = {entry.name: entry for entry in dataclasses.fields(cls)}
        for key in config:
            if key not in known:
                raise InputError(f"report.{key}: no such key in a report{did_you_mean(str(key), known)}")
        required = {
            name
            for name, entry in known.items()
            if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        }
        if missing := sorted(required - set(config)):
            raise InputError(f"report: missing {', '.join(missing)}")
        check_types(cls, "report", config)
        return cls(**config)


def make_row(cls: Any, where: str, values: Any) -> Any:
    """A row or claim of a dataclass from its mapping in the YAML; InputError for a key that is missing or unknown, or a
    value of another type."""
    if isinstance(values, cls):
        return values
    require(isinstance(values, Mapping), where, values, "must be a group of keys")
    check_types(cls, where, values)
    try:
        return cls(**values)
    except TypeError as error:
        raise InputError(f"{where}: {error}") from error


def check_types(cls: type, where: str, values: Mapping[str, Any]) -> None:
    """Raise InputError for the first value of another type than the dataclass's field declares.

    where: the key of the whole, for messages. Keys that are no fields are passed over. `allowed` in the metadata of a
    field is said of a value that is not of its type, instead of the name of the type.
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
