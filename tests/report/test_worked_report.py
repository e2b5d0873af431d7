"""The report of docs/how-to/extending.md works as printed: in a copy of the project it is reproduced, tabulated, drawn
and judged by the commands, on a tiny corpus."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from installed import environment_of, installed_copy
from tiny_runs import TINY, write_corpus

COMMANDS = """
import contextlib, io, json, sys
from infini.cli import main as cli
told = []
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(words) == 0, words
    told.append(out.getvalue())
print(json.dumps(told))
"""
"""Command lines in one process, because importing torch takes longer than each of them."""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, without published records, with the page's report."""
    project_root = Path(__file__).resolve().parents[2]
    copy = installed_copy(project_root, tmp_path_factory.mktemp("extended"))
    page = (project_root / "docs" / "how-to" / "extending.md").read_text(encoding="utf-8")
    (report,) = re.findall(r"`conf/report/first_segment\.yaml`:\n\n```yaml\n(.*?)```", page, re.DOTALL)
    (copy / "infini" / "conf" / "report" / "first_segment.yaml").write_text(report, encoding="utf-8")
    return copy


@pytest.mark.slow
def test_the_pages_report_is_known_to_every_command(extended: Path, tmp_path: Path) -> None:
    corpus, results = write_corpus(tmp_path / "data"), tmp_path / "results"
    places = [f"results_dir={results}"]
    named = ["report=first_segment", *places]
    reproduce = ["reproduce", *named, *TINY, "seed=1,2", "logger=none", f"task.data_dir={corpus}"]
    lines = [
        reproduce,
        # Everything has a record now.
        reproduce,
        ["table", *named],
        ["figure", *named],
        ["table", "report=claims", *places],
    ]
    call = [sys.executable, "-c", COMMANDS, json.dumps(lines)]
    done = subprocess.run(call, cwd=extended, env=environment_of(extended), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    reproduced, again, table, figure, claims = json.loads(done.stdout.splitlines()[-1])
    made = [json.loads(path.read_text(encoding="utf-8")) for path in (results / "runs").glob("*.json")]
    assert sorted((run["model"], run["seed"]) for run in made if run["verb"] == "eval") == [
        *(("infini_linear", 1), ("infini_linear", 1), ("infini_linear", 2), ("infini_linear", 2)),
        *(("local", 1), ("local", 2)),
    ]
    assert {run["config"]["model"]["first_segment"] for run in made if run["config"]["variant"]} == {"zero"}
    assert done.stderr.count("trained before: ") == 6
    for shown in (reproduced, again, table):
        rows = [line for line in shown.splitlines() if "(2)" in line]
        for title in ("Local attention only", "Linear, the first segment", "9.65"):
            assert any(title in line for line in rows), shown
        assert "not as the row is declared at scale laptop" in shown
    drawn = {path.stem for path in (results / "figures").glob("*.png")}
    assert {f"first_segment_laptop_{name}" for name in ("gap_by_position", "gates", "training")} <= drawn
    assert "first_segment_laptop_gap_by_position.png" in figure.replace("\n", "")
    judged = (results / "tables" / "claims_laptop.md").read_text(encoding="utf-8")
    (line,) = [line for line in judged.splitlines() if "bypasses the gate" in line]
    assert "inconclusive" in line and "needs three seeds of both models" in line and "first segment" in claims
