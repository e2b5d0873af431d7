"""What reports have in common that are about one task and whose rows `infini reproduce` makes by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from infini.errors import InputError, did_you_mean
from infini.records import RunRecord
from infini.report.selection import Selection


class RowsOfOneTask:
    """For a frozen dataclass with the fields `run` and `aggregate`, which calls `check_rows` when it is made."""

    run: list[str] | str
    aggregate: str | None
    choice: ClassVar[str]
    """The value of `aggregate` that allows several runs for a cell."""

    def check_rows(self, rows: Mapping[str, Any]) -> None:
        """Raise InputError for an `aggregate` or a name in `run` that is not allowed; rows: by name."""
        if self.aggregate not in (None, self.choice):
            raise InputError(f"report.aggregate={self.aggregate!r}: null or {self.choice}")
        if not isinstance(self.run, (str, list)):
            raise InputError(f"report.run={self.run!r}: all, or names of rows")
        for name in self.wanted:
            if name != "all" and name not in rows:
                raise InputError(f"report.run={name!r}: all, or names of {', '.join(rows)}{did_you_mean(name, rows)}")

    @property
    def wanted(self) -> list[str]:
        """What `run` lists."""
        return [self.run] if isinstance(self.run, str) else self.run

    def chosen(self, names: list[str]) -> list[str]:
        """Of these rows those that `run` names, in the order given."""
        return [name for name in names if "all" in self.wanted or name in self.wanted]

    def as_declared(self, runs: list[RunRecord], row: str, known: Selection) -> list[RunRecord]:
        """All: a row has none that were trained otherwise."""
        return runs

    @property
    def parts(self) -> tuple[Self, ...]:
        """The report itself: it is about one task."""
        return (self,)

    @property
    def one_corpus(self) -> bool:
        """Rows have tokenizers of their own, which each names."""
        return False

    @property
    def ways_to_choose(self) -> tuple[str, ...]:
        return (self.choice,)
