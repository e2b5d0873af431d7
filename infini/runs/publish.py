"""`infini publish <run id> ...`: copy finished runs into the published results."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from infini import records
from infini.config.schema import Config, groups, key_of
from infini.errors import InputError, did_you_mean
from infini.records import RunRecord
from infini.report.load import draw, load_report, names_a_report, refuse_seed, report_of_runs
from infini.report.render import write_report
from infini.report.search import SearchReport
from infini.report.selection import DisputedError, RunReport, Selection, select_runs
from infini.runs.claims import FILE as CLAIMS_FILE
from infini.runs.claims import claims_text, declared_report
from infini.system.paths import is_file
from infini.system.progress import progress_bar

EXAMPLES, MAX_BYTES = ".jsonl", 1 << 20
"""Suffix of the file with a record's examples, and the maximum size of a published one. For a larger file, only the
hash in the record is published."""
CLAIMS_SCALE = "laptop"
"""The scale of the runs that CLAIMS.md judges."""


def run(cfg: Config, overrides: list[str], ids: list[str]) -> int:
    """Publish the named runs, or without an id and with `report=<name>` every run behind that report's cells.

    Raises:
        InputError: a run is unknown or must not be published, or there is nothing to publish.
    """
    refuse_seed("publish", overrides)
    results_dir = Path(cfg.results_dir)
    declared = load_report(cfg.report)
    # A search is published as far as these choose its trainings; its table is the declared one.
    chooses = ("report.aggregate", *(("report.models", "report.rates") if isinstance(declared, SearchReport) else ()))
    for text in overrides:
        if key_of(text).startswith("report.") and key_of(text) not in chooses:
            raise InputError(f"{text}: the published table is as the project declares it; leave it out")
    if "publish" in declared.verbs:
        if ids:
            raise InputError(f"{ids[0]}: report={declared.name} publishes its newest runs; leave the run out")
        work = importlib.import_module(declared.verbs["publish"].module)
        print(*work.publish(declared, cfg, overrides, records.published_dir()), sep="\n")
        return 0
    report = report_of_runs(cfg.report, "publish")
    for text in overrides if ids else ():
        if key_of(text) == "scale":
            raise InputError(f"{text}: runs that are named have a scale of their own; leave it out, or name no run")
    if not ids:
        if not names_a_report(overrides):
            raise InputError(
                "no run and no report is named: `infini publish <run id>` or `infini publish report=<name>`"
            )
        known = records.load_records(results_dir)
        chosen = [select_runs(part, cfg.scale.name, known) for part in report.parts]
        # If one corpus is real, runs on a synthetic one are not published.
        real = [selection for selection in chosen if selection.runs and not selection.synthetic]
        runs = [run for selection in real or chosen for run in selection.all_runs]
        if not runs:
            raise InputError(f"{results_dir}: no runs of {report.name} at scale {cfg.scale.name} to publish")
        ids = [run.run_id for run in runs]
    for path in publish(ids, results_dir, records.published_dir(), report):
        print(path)
    return 0


def publish(ids: Sequence[str], results_dir: Path, published_dir: Path, report: RunReport) -> list[Path]:
    """Copy runs and the training runs behind them into `published_dir`, then renew tables, figures and CLAIMS.md there.
    Published tables of other reports are renewed too if the runs fill cells of theirs.

    ids: run ids under `results_dir`. report: its tables and figures are made, at every scale that has published runs of
    its task. Everything is checked before the first file is written; returns the paths of all files written.

    Raises:
        InputError: a run is unknown, must not be published (see check_publishable), competes with another run for a
            cell, or is of another task than the report.
    """
    before = {record.run_id: record for record in records.load_records(published_dir)}
    chosen = with_parents(ids, results_dir, before)
    tasks = [part.task for part in report.parts]
    if other := {chosen[run_id].task for run_id in ids} - set(tasks):
        of, about = ", ".join(sorted(other)), " or ".join(tasks)
        declared = {name: declared_report(name) for name in groups()["report"]}
        fitting = [name for name, found in declared.items() if other <= {part.task for part in found.parts}]
        fits = f"; add report={' or report='.join(fitting)}" if fitting else ""
        raise InputError(f"report={report.name} is about task={about}, not {of}{fits}")
    for record in chosen.values():
        check_publishable(record, results_dir, before)
    after = list({**before, **chosen}.values())
    scales = sorted({record.scale for record in after if record.verb == "eval" and record.task in tasks})
    # A choice on the command line (report.aggregate) settles this table alone. Everybody else makes the published table
    # again as the project declares it, which would refuse these runs.
    as_declared = declared_report(report.name)
    assert isinstance(as_declared, RunReport)
    choice = f"report.aggregate={as_declared.aggregate or 'null'}"
    for scale in scales:
        what = f"report={report.name}: its published table is made with {choice}, which cannot choose here"
        _selections(as_declared, scale, after, what)
    shown = [(report, scale) for scale in scales] + _others(report, set(ids), after, published_dir)
    with progress_bar("making tables", len(shown) + 1, sys.stderr.isatty()) as advance:
        rendered = []
        for found, scale in shown:
            rendered.append((found, found.render(scale, after)))
            advance(1)
        claims = claims_text(CLAIMS_SCALE, after)
        advance(1)

    written = copy_runs(chosen, results_dir, published_dir)
    figures = sum(len(found.parts) for found, _ in rendered)
    with progress_bar("drawing figures", figures, sys.stderr.isatty()) as advance:
        for found, tables in rendered:
            written += write_report(tables, published_dir / "tables", links={"published": "../runs"})
            for part in found.parts:
                selection = select_runs(part, tables.scale, after)
                folder, kinds = published_dir / "figures", part.published_figures
                written += without_svg(draw(part, tables.scale, selection, folder, after, kinds))
                advance(1)
    records.write_atomically(published_dir / CLAIMS_FILE, claims.encode())
    behind = {
        run.run_id for scale in scales for part in report.parts for run in select_runs(part, scale, after).all_runs
    }
    for run_id in ids:
        if run_id not in behind:
            print(f"{run_id}: published, but it fills no cell of report={report.name}", file=sys.stderr)
    return [*written, published_dir / CLAIMS_FILE]


def _selections(report: RunReport, scale: str, after: Sequence[RunRecord], disputed: str) -> list[Selection]:
    """The runs behind each part of a report. InputError that begins with `disputed` where runs compete for a cell."""
    try:
        return [select_runs(part, scale, after) for part in report.parts]
    except DisputedError as error:
        raise InputError(f"{disputed}: {error.problem}; publish one of the two") from error


def without_svg(figures: Sequence[Path]) -> list[Path]:
    """Remove the SVG files: pages show the PNG, and `infini figure` draws both. Returns the paths that stay."""
    for path in figures:
        if path.suffix == ".svg":
            path.unlink()
    return [path for path in figures if path.suffix != ".svg"]


def copy_runs(chosen: dict[str, RunRecord], results_dir: Path, published_dir: Path) -> list[Path]:
    """Copy records and the files that belong to them. Returns the paths of the copies.

    If it is stopped, no record is there without what belongs to it: trainings come before what started from them, and
    a run's examples before its record.
    """
    written: list[Path] = []
    for run_id in sorted(chosen, key=lambda name: (chosen[name].verb != "train", chosen[name].started)):
        target = records.record_path(published_dir, run_id)
        source = records.record_path(results_dir, run_id)
        # The examples of an evaluation are in a file of the same name, one per line. Those of a record that does not
        # name it are published already, and stay as they are.
        named = EXAMPLES in chosen[run_id].data.get("beside", {})
        for made in (source.with_suffix(EXAMPLES), source) if named else (source,):
            if not made.is_file():
                continue
            if made != source and made.stat().st_size > MAX_BYTES:
                print(f"{made}: not copied, because it is too large; its SHA-256 is in the record", file=sys.stderr)
                continue
            records.remove_leftovers(target.with_suffix(made.suffix))
            records.write_atomically(target.with_suffix(made.suffix), made.read_bytes())
            written.append(target.with_suffix(made.suffix))
    return written


def _others(
    report: RunReport, ids: set[str], after: list[RunRecord], published_dir: Path
) -> list[tuple[RunReport, str]]:
    """Other reports, with the scales at which their published tables show one of these runs."""
    found: list[tuple[RunReport, str]] = []
    for name in groups()["report"]:
        tables = [path.stem for path in (published_dir / "tables").glob(f"{name}_*.md")] if name != report.name else []
        scales = [scale for scale in groups()["scale"] if f"{name}_{scale}" in tables]
        other = declared_report(name) if scales else None
        if isinstance(other, RunReport):
            for scale in scales:
                what = f"report={name} has rows of the same models, and its published table could not be made again"
                selections = _selections(other, scale, after, what)
                if any(run.run_id in ids for selection in selections for run in selection.all_runs):
                    found.append((other, scale))
    return found


def with_parents(ids: Iterable[str], results_dir: Path, published: dict[str, RunRecord]) -> dict[str, RunRecord]:
    """The records of `ids`, and of the training runs behind them that are not published yet."""
    chosen: dict[str, RunRecord] = {}
    for run_id in ids:
        record = _find(run_id, results_dir)
        chosen[run_id] = record
        # Its training, and the trainings from which that one started.
        before = record.parent or record.started_from
        while before and before not in chosen and before not in published:
            chosen[before] = _find(before, results_dir)
            before = chosen[before].started_from
    return chosen


def _find(run_id: str, results_dir: Path) -> RunRecord:
    path = records.record_path(results_dir, run_id)
    if not re.fullmatch(r"[A-Za-z0-9_-]+", run_id) or not is_file(path):
        known = [other.stem for other in sorted(path.parent.glob("*.json"))]
        raise InputError(f"no run {run_id!r} in {results_dir / 'runs'}{did_you_mean(run_id, known)}")
    return records.read_record(path)


def check_publishable(record: RunRecord, results_dir: Path, before: dict[str, RunRecord]) -> None:
    """Raise InputError if a run must not be published. before: the published records."""
    if record.run_id in before and before[record.run_id] != record:
        raise InputError(f"run {record.run_id} is already published with different content")
    if len(record.environment.get("git_revisions") or ()) > 1:
        raise InputError(f"run {record.run_id} cannot be published: it was made at more than one commit")
    if products := record.environment.get("products"):
        what = f"its matrix products are partly in {', partly in '.join(products)}"
        raise InputError(f"run {record.run_id} cannot be published: {what}")
    dirty = record.environment.get("git_dirty")
    if dirty is None:
        raise InputError(f"run {record.run_id} cannot be published: the commit it was made from is not known")
    if dirty:
        what = f"files that are not those of its commit{records.describe_changes(record.environment)}"
        why = "uncommitted changes, or another commit was checked out while it ran"
        raise InputError(f"run {record.run_id} cannot be published: it was made from {what}: {why}")
    if record.synthetic:
        raise InputError(f"run {record.run_id} cannot be published: its data is synthetic")
    for suffix, stated in record.data.get("beside", {}).items():
        path = records.record_path(results_dir, record.run_id).with_suffix(suffix)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != stated["sha256"]:
            raise InputError(f"{path}: not what run {record.run_id} wrote, by the SHA-256 in its record")
    path = records.record_path(results_dir, record.run_id).with_suffix(EXAMPLES)
    # Records that were published before they named their files have them there.
    if EXAMPLES not in record.data.get("beside", {}) and record.run_id not in before and path.is_file():
        raise InputError(f"{path}: not named in the record of run {record.run_id}, which did not write it; remove it")
