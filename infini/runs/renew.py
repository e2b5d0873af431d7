"""`make results`: make the published tables, CLAIMS.md and figures again from the published records.

This applies a change of the code to all of them. `infini publish` renews only those that a new run changes.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from infini import records
from infini.config.compose import compose
from infini.config.schema import groups
from infini.report.render import write_report
from infini.runs import figure
from infini.runs.claims import FILE as CLAIMS_FILE
from infini.runs.claims import claims_text, declared_report
from infini.runs.publish import CLAIMS_SCALE
from infini.runs.table import tabulate
from infini.system.progress import progress_bar


def renew(published_dir: Path, target: Path) -> list[Path]:
    """Make every published table and CLAIMS.md again and write them below `target`. Returns the paths of the files.

    Tables that need no record (Table 1) are left out.
    """
    known = records.load_records(published_dir)
    there = {path.stem for path in (published_dir / "tables").glob("*.md")}
    named = [(name, scale) for name in groups()["report"] for scale in groups()["scale"] if f"{name}_{scale}" in there]
    written = []
    with progress_bar("making tables", len(named) + 1, sys.stderr.isatty()) as advance:
        for name, scale in named:
            if (report := declared_report(name)).shows_own_runs:
                words = [f"report={name}", f"scale={scale}"]
                made = tabulate(report, compose(words), words, known, None)
                written += write_report(made, target / "tables", links={"published": "../runs"})
            advance(1)
        claims = target / CLAIMS_FILE
        records.write_atomically(claims, claims_text(CLAIMS_SCALE, known).encode())
        advance(1)
    return [*written, claims]


def renew_figures(published_dir: Path, target: Path) -> list[Path]:
    """Draw the published figures again, as PNG, at every scale that has published runs, and put them in place of those
    in `target`. Returns their paths."""
    scales = {run.scale for run in records.load_records(published_dir)} & set(groups()["scale"])
    with tempfile.TemporaryDirectory() as empty:
        for scale in sorted(scales):
            figure.draw_published(compose([f"results_dir={empty}", f"scale={scale}"]), published_dir)
        target.mkdir(parents=True, exist_ok=True)
        written = [Path(shutil.copy(path, target)) for path in sorted((Path(empty) / "figures").glob("*.png"))]
        for old in set(target.glob("*.png")) - set(written):
            old.unlink()
        return written


if __name__ == "__main__":
    published = records.published_dir()
    print(*renew(published, published), *renew_figures(published, published / "figures"), sep="\n")
