"""`make results`: the published tables, CLAIMS.md and figures made again from the published records.

A change to how these are made reaches the published ones this way; `infini publish` renews those that a run changes.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from infini import records
from infini.config.compose import compose
from infini.config.schema import groups
from infini.records import RunRecord
from infini.report.load import OfRuns, render
from infini.report.render import write_report
from infini.report.search import SearchReport, build_search
from infini.report.tables import RenderedReport
from infini.runs import figure
from infini.runs.claims import FILE as CLAIMS_FILE
from infini.runs.claims import claims_text, declared_report
from infini.runs.publish import CLAIMS_SCALE
from infini.runs.search import found_by_search
from infini.system.progress import progress_bar


def renew(published_dir: Path, target: Path) -> list[Path]:
    """Make every table below `published_dir` again, and CLAIMS.md, and write them below `target`.

    Tables that rest on no record (Table 1) are left out. Returns the paths that were written.
    """
    known = records.load_records(published_dir)
    there = {path.stem for path in (published_dir / "tables").glob("*.md")}
    named = [(name, scale) for name in groups()["report"] for scale in groups()["scale"] if f"{name}_{scale}" in there]
    written = []
    with progress_bar("making tables", len(named) + 1, sys.stderr.isatty()) as advance:
        for name, scale in named:
            if (made := _rendered(name, scale, known)) is not None:
                written += write_report(made, target / "tables", links={"published": "../runs"})
            advance(1)
        claims = target / CLAIMS_FILE
        records.write_atomically(claims, claims_text(CLAIMS_SCALE, known).encode())
        advance(1)
    return [*written, claims]


def _rendered(name: str, scale: str, known: list[RunRecord]) -> RenderedReport | None:
    report = declared_report(name)
    if isinstance(report, SearchReport):
        words = [f"report={name}", f"scale={scale}"]
        found = found_by_search(report, compose(words), words, known)
        return build_search(report, scale, found, {run.run_id for run in known})
    return render(report, scale, known) if isinstance(report, OfRuns) else None


if __name__ == "__main__":
    published = records.published_dir()
    print(*renew(published, published), sep="\n")
    # Where nothing is the reader's own, the published runs are what is drawn.
    with tempfile.TemporaryDirectory() as empty:
        figure.run(compose([f"results_dir={empty}"]), [])
        shutil.copytree(Path(empty) / "figures", published / "figures", dirs_exist_ok=True)
