"""Base of the reports about one task whose rows are run by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infini.errors import InputError, did_you_mean, require
from infini.report.selection import RunReport

MAPPING = "names with what belongs to each, {a: ..., b: ...}"


@dataclass(frozen=True, kw_only=True)
class RowsOfOneTask(RunReport):
    """For a frozen dataclass, which calls `check_rows` when it is made."""

    run: list[str] | str = "all"
    """Rows that `infini reproduce` makes, of those with a model: names, or all."""
    aggregate: str | None = None
    """What to do with several runs of one cell: null (an error) or one of `choices`. See RunReport; with `largest` the
    run with most examples counts, the newest of several such runs."""

    def check_rows(self, rows: Mapping[str, Any]) -> None:
        """Raise InputError for an `aggregate` or a name in `run` that is not allowed. rows: by name."""
        allowed = f"null or {' or '.join(self.choices)}"
        require(self.aggregate in (None, *self.choices), "report.aggregate", self.aggregate, allowed)
        require(isinstance(self.run, str | list), "report.run", self.run, "all, or names of rows")
        for name in self.wanted:
            if name != "all" and name not in rows:
                raise InputError(f"report.run={name!r}: all, or names of {', '.join(rows)}{did_you_mean(name, rows)}")

    @property
    def wanted(self) -> list[str]:
        """The names in `run`."""
        return [self.run] if isinstance(self.run, str) else self.run

    def chosen(self, names: list[str]) -> list[str]:
        """The rows among `names` that `run` names, in the order given."""
        return [name for name in names if "all" in self.wanted or name in self.wanted]


def make_row(cls: Any, where: str, values: Any) -> Any:
    """A row of a dataclass from its mapping in the YAML; InputError for a key that is missing or unknown."""
    try:
        return values if isinstance(values, cls) else cls(**values)
    except TypeError as error:
        raise InputError(f"{where}: {error}") from error


def rows_of_models(
    report: str, rows: Mapping[str, str], models: Sequence[str], known: Mapping[str, str] | None = None
) -> list[str]:
    """The rows whose model is one of `models`, or all rows if `models` is empty.

    rows: row -> its model, for the rows to run. known: the same for all rows among which report.run chooses; None if
    the report has no report.run. Raises InputError for a model that has no row.
    """
    for model in models:
        if model in rows.values():
            continue
        others = [row for row, of in (known or {}).items() if of == model]
        if others:
            raise InputError(
                f"model={model}: report={report} has rows of it that report.run leaves out; add "
                f"report.run=[{','.join(others)}]"
            )
        has = ", ".join(dict.fromkeys((known or rows).values()))
        raise InputError(f"model={model}: report={report} has no row of this model; it has rows of {has}")
    return [row for row, model in rows.items() if not models or model in models]
