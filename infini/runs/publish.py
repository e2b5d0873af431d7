"""`infini publish <run id> ...`: move finished runs into the results that go with the code."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infini import records
from infini.config.schema import groups
from infini.errors import InputError, did_you_mean
from infini.records import RunRecord
from infini.report.load import OfRuns, draw, load_report, names_a_report, refuse_seed, render, report_of_runs
from infini.report.render import write_report
from infini.report.search import SearchReport, build_search
from infini.report.selection import select_runs
from infini.runs.claims import FILE as CLAIMS_FILE
from infini.runs.claims import claims_text, declared_report
from infini.system.paths import is_file
from infini.system.progress import progress_bar

if TYPE_CHECKING:
    from infini.config.schema import Config

EXAMPLES, MAX_BYTES = ".jsonl", 1 << 20
"""Suffix of the file beside a record that has its examples, and the most bytes of one that is published; of a larger
one the hash is, in the record."""
CLAIMS_SCALE = "laptop"
"""The scale at which CLAIMS.md judges."""


def run(cfg: Config, overrides: list[str], ids: list[str]) -> int:
    """Publish the named runs, or with no id and `report=<name>` every run behind that report's cells.

    Raises:
        InputError: a run is unknown or must not be published, or there is nothing to publish.
    """
    refuse_seed("publish", overrides)
    results_dir = Path(cfg.results_dir)
    declared = load_report(cfg.report)
    if isinstance(declared, SearchReport) and not ids:
        print(*publish_search(declared, cfg, overrides, records.published_dir()), sep="\n")
        return 0
    report = report_of_runs(cfg.report, "publish")
    if not ids:
        if not names_a_report(overrides):
            raise InputError("publish what? `infini publish <run id> ...`, or `infini publish report=<name>`")
        known = records.load_records(results_dir)
        chosen = [select_runs(part, cfg.scale.name, known) for part in report.parts]
        # Where one corpus is real, the runs on a made-up one stay behind.
        real = [selection for selection in chosen if selection.runs and not selection.synthetic]
        runs = [run for selection in real or chosen for run in selection.all_runs]
        if not runs:
            raise InputError(f"{results_dir}: no runs of {report.name} at scale {cfg.scale.name} to publish")
        ids = [run.run_id for run in runs]
    for path in publish(ids, results_dir, records.published_dir(), report):
        print(path)
    return 0


def publish(ids: Sequence[str], results_dir: Path, published_dir: Path, report: OfRuns) -> list[Path]:
    """Copy runs and the training runs they came from into `published_dir`, then renew tables, figures and
    CLAIMS.md there; tables of other reports too, where they lie there and the runs fill cells of theirs.

    Everything is checked before the first file is written.

    Args:
        ids: run ids under `results_dir`.
        results_dir: where runs were made.
        published_dir: where published results lie.
        report: the report whose tables and figures are renewed or made, at every scale that has published runs of its
            task.

    Returns:
        Paths of all files written.

    Raises:
        InputError: a run is unknown, was made from a tree with uncommitted changes or from no known commit, saw
            synthetic data, differs from a published run of the same id, has other examples beside it than it wrote,
            would be a second run for a cell, or is of another task than the report.
    """
    before = {record.run_id: record for record in records.load_records(published_dir)}
    chosen = with_parents(ids, results_dir, before)
    tasks = [part.task for part in report.parts]
    if other := {chosen[run_id].task for run_id in ids} - set(tasks):
        of, about = ", ".join(sorted(other)), " or ".join(tasks)
        raise InputError(f"report={report.name} is about task={about}, not {of}; choose its tables with report=")
    for record in chosen.values():
        _check_publishable(record, results_dir, before)
    after = list({**before, **chosen}.values())
    scales = sorted({record.scale for record in after if record.verb == "eval" and record.task in tasks})
    shown = [(report, scale) for scale in scales] + _others(report, set(ids), after, published_dir)
    with progress_bar("making tables", len(shown) + 1, sys.stderr.isatty()) as advance:
        rendered = []
        for found, scale in shown:
            rendered.append((found, render(found, scale, after)))
            advance(1)
        claims = claims_text(CLAIMS_SCALE, after)
        advance(1)

    written = _copy(chosen, results_dir, published_dir)
    figures = sum(len(found.parts) for found, _ in rendered)
    with progress_bar("drawing figures", figures, sys.stderr.isatty()) as advance:
        for found, tables in rendered:
            written += write_report(tables, published_dir / "tables", links={"published": "../runs"})
            for part in found.parts:
                written += draw(
                    part, tables.scale, select_runs(part, tables.scale, after), published_dir / "figures", after
                )
                advance(1)
    records.write_atomically(published_dir / CLAIMS_FILE, claims.encode())
    behind = {
        run.run_id for scale in scales for part in report.parts for run in select_runs(part, scale, after).all_runs
    }
    for run_id in ids:
        if run_id not in behind:
            print(f"{run_id}: published, but it fills no cell of report={report.name}", file=sys.stderr)
    return [*written, published_dir / CLAIMS_FILE]


def publish_search(report: SearchReport, cfg: Config, overrides: list[str], published_dir: Path) -> list[Path]:
    """Copy the trainings of a search that are in results_dir, as far as its grid was extended, and write its table.

    Raises InputError as publish does, or where there are none.
    """
    from infini.runs.search import found_by_search

    results_dir, before = Path(cfg.results_dir), {run.run_id: run for run in records.load_records(published_dir)}
    known = records.load_records(results_dir)
    found = found_by_search(report, cfg, overrides, known)
    runs = [run for models in found.values() for losses in models.values() for run in losses.values()]
    chosen = {run.run_id: run for run in runs if run is not None}
    if not chosen:
        raise InputError(f"{results_dir}: no runs of {report.name} at scale {cfg.scale.name} to publish")
    for record in chosen.values():
        _check_publishable(record, results_dir, before)
    # Of all tasks: the table is one, whichever of them this search was of.
    every_task = [text for text in overrides if not text.startswith("task=")]
    shown = found_by_search(report, cfg, every_task, {**before, **chosen}.values())
    tables = build_search(report, cfg.scale.name, shown, {*before, *chosen})
    written = _copy(chosen, results_dir, published_dir)
    return written + write_report(tables, published_dir / "tables", links={"published": "../runs"})


def _copy(chosen: dict[str, RunRecord], results_dir: Path, published_dir: Path) -> list[Path]:
    """The records, and what lies beside them; the paths that were written."""
    written: list[Path] = []
    for run_id in chosen:
        target = records.record_path(published_dir, run_id)
        source = records.record_path(results_dir, run_id)
        # What a record points to lies beside it: the examples of an evaluation, a line each.
        for made in (source, source.with_suffix(EXAMPLES)):
            if not made.is_file():
                continue
            if made != source and made.stat().st_size > MAX_BYTES and EXAMPLES in chosen[run_id].data.get("beside", {}):
                print(f"{made}: stays there, for its size; its SHA-256 is in the record", file=sys.stderr)
                continue
            records.write_atomically(target.with_suffix(made.suffix), made.read_bytes())
            written.append(target.with_suffix(made.suffix))
    return written


def _others(report: OfRuns, ids: set[str], after: list[RunRecord], published_dir: Path) -> list[tuple[OfRuns, str]]:
    """Other reports, and scales of theirs, whose published tables show one of these runs."""
    found: list[tuple[OfRuns, str]] = []
    for name in groups()["report"]:
        tables = [path.stem for path in (published_dir / "tables").glob(f"{name}_*.md")] if name != report.name else []
        scales = [scale for scale in groups()["scale"] if f"{name}_{scale}" in tables]
        other = declared_report(name) if scales else None
        if isinstance(other, OfRuns):
            for scale in scales:
                selections = [select_runs(part, scale, after) for part in other.parts]
                if any(run.run_id in ids for selection in selections for run in selection.all_runs):
                    found.append((other, scale))
    return found


def with_parents(ids: Iterable[str], results_dir: Path, published: dict[str, RunRecord]) -> dict[str, RunRecord]:
    """The records of `ids` and of the training runs behind them, the latter only where not published already."""
    chosen: dict[str, RunRecord] = {}
    for run_id in ids:
        record = _find(run_id, results_dir)
        chosen[run_id] = record
        # The training behind it, and the training that one started from.
        before = record.parent
        while before and before not in chosen and before not in published:
            chosen[before] = _find(before, results_dir)
            before = chosen[before].config.get("init_from")
    return chosen


def _find(run_id: str, results_dir: Path) -> RunRecord:
    path = records.record_path(results_dir, run_id)
    if not re.fullmatch(r"[A-Za-z0-9_-]+", run_id) or not is_file(path):
        known = [other.stem for other in sorted(path.parent.glob("*.json"))]
        raise InputError(f"no run {run_id!r} in {results_dir / 'runs'}{did_you_mean(run_id, known)}")
    return records.read_record(path)


def _check_publishable(record: RunRecord, results_dir: Path, before: dict[str, RunRecord]) -> None:
    if record.run_id in before and before[record.run_id] != record:
        raise InputError(f"run {record.run_id} is published already, with another content")
    if len(record.environment.get("git_revisions") or ()) > 1:
        raise InputError(f"run {record.run_id} cannot be published: it was made at more than one commit")
    dirty = record.environment.get("git_dirty")
    if dirty is None:
        raise InputError(f"run {record.run_id} cannot be published: the commit it was made from is not known")
    if dirty:
        raise InputError(f"run {record.run_id} cannot be published: it was made from a tree with uncommitted changes")
    if record.synthetic:
        raise InputError(f"run {record.run_id} cannot be published: its data is synthetic")
    for suffix, stated in record.data.get("beside", {}).items():
        path = records.record_path(results_dir, record.run_id).with_suffix(suffix)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != stated["sha256"]:
            raise InputError(f"{path}: not what run {record.run_id} wrote, by the SHA-256 in its record")
