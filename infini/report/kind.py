"""The protocol of reports: each kind of report is one class that declares its keys and what verbs do with it.

A report is one YAML in `conf/report`. Its kind is the class in `infini.report.load.KINDS` whose `sign` is among its
keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

from infini.config.schema import OF_REPORTS, PLACES, SHOWN, TRAINED, groups
from infini.errors import InputError, did_you_mean
from infini.report.typed import check_types

FINISHED_RUNS = (*OF_REPORTS, "scale", "seed", "results_dir", *SHOWN)
"""Keys of verbs that use finished runs only."""
REPRODUCED = (*OF_REPORTS, *TRAINED, "seed", "plan", "workers", *PLACES, *SHOWN)
"""Keys that `infini reproduce` reads with every report that it can make."""


@dataclass(frozen=True)
class OwnVerb:
    """What a verb reads and does with one kind of report."""

    patterns: tuple[str, ...] | None
    """Keys that it reads, see infini.config.schema; None: those that the verb declares."""
    never: tuple[str, ...] = ()
    """Keys that it does not read although a pattern covers them."""
    module: str = ""
    """Module with a function of the verb's name that does the work; empty: the verb's own module does it."""


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
