"""The protocol of reports: each kind of report is one class that declares its keys and what verbs do with it.

A report is one YAML in `conf/report`. Its kind is the class in `infini.report.load.KINDS` whose `sign` is among its
keys. Values, from the YAML or the command line, are checked against the types of the class; checks that need more than
a type are those of the class and rely on these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

from infini.config.schema import FOLDER_KEYS, REPORT_KEYS, SHOWN, TRAINING_KEYS, groups, settings_in
from infini.config.typed import build
from infini.records import value_at
from infini.report.tables import RenderedReport, Table

FINISHED_RUNS = (*REPORT_KEYS, "scale", "seed", "results_dir", *SHOWN)
"""Keys of verbs that use finished runs only."""
REPRODUCED = (*REPORT_KEYS, *TRAINING_KEYS, "seed", "plan", "workers", *FOLDER_KEYS, *SHOWN)
"""Keys that `infini reproduce` reads with every report that it can make."""


@dataclass(frozen=True)
class OwnVerb:
    """The settings and the work of a verb for one kind of report."""

    patterns: tuple[str, ...] | None
    """Keys that it reads, see infini.config.schema; None: those that the verb declares."""
    excludes: tuple[str, ...] = ()
    """Keys that it does not read although a pattern covers them."""
    module: str = ""
    """Module with a function of the verb's name that does the work; empty: the verb's own module does it."""


def usual_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of the options with which the model of a configuration is shipped: those of a row that does
    not set them. Options that the configuration, which may be older, lacks are left out. A pretrained model has only
    those of its attention, and none if its base may have been injected with them."""
    model, found = config.get("model", {}), {}
    shipped = _shipped_options(str(model.get("name")))
    if "base" in model:
        shipped = {key: shipped[key] for key in _OF_ATTENTION if model["base"] == shipped["base"]}
    for key, value in shipped.items():
        reference = str(value)[2:-1] if str(value).startswith("${") else ""
        usual = value_at(config, reference) if reference else value
        if key in model and not (reference and usual is None):
            found[f"model.{key}"] = usual
    return found


_OF_ATTENTION = ("gate_init", "window", "sinks", "layers", "memory_decay", "input_gate")


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
    """Printed below its tables, one note per line."""
    own_claims: tuple[Mapping[str, Any], ...] = ()
    """Claims about this report, which report=claims judges too; see infini.report.verdicts.Claim."""

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
        title, kept = f"{self.title}, scale {scale}{mark}", tuple(filter(None, (*self.note.splitlines(), *notes)))
        return RenderedReport(self.name, scale, title, tuple(tables), kept, **more)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A report from the `report` group of a configuration.

        Raises:
            InputError: a key is missing, unknown or has a value of another type or that is not allowed.
        """
        return build(cls, config, "report")
