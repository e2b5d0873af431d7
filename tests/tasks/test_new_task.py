"""No command lists tasks: that of docs/how-to/extending.md works as written, and so does a copy of the passkey task."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from installed import environment_of, installed_copy
from tiny_runs import TINY, write_corpus

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "tasks/letters/task.py",
    "tasks/letters/config.py",
    "conf/task/letters.yaml",
    "conf/dims/letters_laptop.yaml",
    "conf/recipe/letters_laptop.yaml",
]
LOOKUP_TABLE = """
defaults:
  - override /task@_global_.task: lookup

name: lookup_table
title: A table of the copied task
task: lookup
aggregate: largest
lengths: [256]
depths: [start]
run: all
rows:
  linear:
    title: Linear, copied
    model: infini_linear
    recipe: lookup_{scale}
  started:
    title: Linear, started from letters
    model: infini_linear
    recipe: lookup_{scale}
    start: letters
"""
COMMANDS = """
import contextlib, io, json, sys
from infini.cli import main as cli
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(words)
    print(json.dumps([code, out.getvalue()]))
"""
"""Command lines, one after the other in one process: importing torch takes longer than each of them."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the page's task, and the passkey task under another name."""
    copy = installed_copy(ROOT, tmp_path_factory.mktemp("project"))
    page = (ROOT / "docs" / "how-to" / "extending.md").read_text(encoding="utf-8")
    files = re.findall(r"`([a-z/]+letters[a-z_/]*\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == FILES
    (copy / "infini" / "tasks" / "letters").mkdir()
    for name, content in files:
        (copy / "infini" / name).write_text(content, encoding="utf-8")
    column = re.search(r"in `(conf/report/[a-z0-9_]+\.yaml)`, under `benchmarks`, `(letters: Letters)`", page)
    assert column is not None
    report = copy / "infini" / column[1]
    content = report.read_text(encoding="utf-8")
    assert content.count("\nbenchmarks:\n") == 1
    report.write_text(content.replace("\nbenchmarks:\n", f"\nbenchmarks:\n  {column[2]}\n"), encoding="utf-8")
    shutil.copytree(ROOT / "tasks" / "passkey", copy / "infini" / "tasks" / "lookup")
    for group, name in (("task", "{}"), ("dims", "{}_laptop"), ("recipe", "{}_laptop")):
        folder = copy / "infini" / "conf" / group
        text = (folder / f"{name.format('passkey')}.yaml").read_text(encoding="utf-8")
        renamed = re.sub(r"^name: passkey", "name: lookup", text, flags=re.MULTILINE)
        (folder / f"{name.format('lookup')}.yaml").write_text(renamed, encoding="utf-8")
    (copy / "infini" / "conf" / "report" / "lookup_table.yaml").write_text(LOOKUP_TABLE, encoding="utf-8")
    return copy


def run(project: Path, *lines: list[str]) -> list[str]:
    """The output of each command line."""
    call = [sys.executable, "-c", COMMANDS, json.dumps(lines)]
    done = subprocess.run(
        call, cwd=project, env=environment_of(project), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in answers] == [0] * len(lines), done.stderr
    return [printed for _, printed in answers]


def records(results: Path, verb: str) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (results / "runs").glob(f"*-{verb}-*.json")]
    return sorted(found, key=lambda record: record["started"])


@pytest.mark.slow
def test_the_pages_task_is_trained_evaluated_continued_and_tabulated(project: Path, tmp_path: Path) -> None:
    corpus, results = write_corpus(tmp_path / "data"), f"results_dir={tmp_path}/results"
    task = ["task=letters", results, f"task.data_dir={corpus}"]
    fp32 = ["parallel.accelerator=cpu", "parallel.precision=fp32", "scale.vocab_size=300"]
    generate = ["generate", *task, "prompt=abc", "decoding.max_new_tokens=5", "decoding.temperature=1"]
    _, printed, table, continued, _, meaning = run(
        project,
        ["train", *task, *TINY, "logger=none"],
        ["eval", *task, *fp32, "task.late_from=512"],
        ["table", results],
        generate,
        ["eval", *task, *fp32, "task.late_from=65536"],
        ["eval", "task=letters", "--help"],
    )
    (trained,) = records(tmp_path / "results", "train")
    first, second = records(tmp_path / "results", "eval")
    assert {run["task"] for run in (trained, first, second)} == {"letters"}
    assert first["parent"] == second["parent"] == trained["run_id"]
    late = first["results"]["late_nll_per_token"]
    expected = sum(max(entry["tokens"] - 512, 0) for entry in first["documents"])
    assert 0 < late["n"] == expected and late["value"] > 0
    assert second["results"]["late_nll_per_token"]["value"] is None
    assert "late_nll_per_token" in printed and "perplexity" in printed
    assert continued.strip()
    assert "Letters" in table
    assert "task.late_from=1024" in meaning and "Position in a letter from which tokens count as late" in meaning


@pytest.mark.slow
def test_a_copy_of_the_passkey_task_works(project: Path, tmp_path: Path) -> None:
    corpus, results = write_corpus(tmp_path / "data"), f"results_dir={tmp_path}/results"
    lookup = ["task=lookup", results, "task.examples=1", "length=256", "depth=start"]
    tiny = [*TINY, "recipe.curriculum=null", "recipe.short_sequences=null"]
    tiny += ["recipe.segments_per_sequence=12", "logger=none"]
    cpu = ["parallel.accelerator=cpu", "parallel.precision=fp32"]
    run(
        project,
        ["train", "task=lookup", results, *tiny, "task.digits=4", "recipe.long_history=null"],
        ["eval", *lookup, *cpu, "scale.vocab_size=300"],
        ["eval", *lookup, *cpu, "scale.vocab_size=300", "dims.segment_length=32"],
        ["train", "task=pg19", results, f"task.data_dir={corpus}", *TINY, "logger=none"],
    )
    trained = records(tmp_path / "results", "train")[-1]
    run(project, ["eval", *lookup, *cpu, "scale.vocab_size=300", "length=4K", f"checkpoint={trained['run_id']}"])
    evaluated = records(tmp_path / "results", "eval")
    assert [run["task"] for run in evaluated] == ["lookup"] * 3
    assert [run["config"]["dims"]["segment_length"] for run in evaluated] == [16, 32, 16]
    # Asked for the digits that were trained; another task's model for those of the configuration.
    assert [run["config"]["task"]["digits"] for run in evaluated] == [4, 4, 5]
    assert all(run["data"]["name"] == "lookup" for run in evaluated)


@pytest.mark.slow
def test_a_copy_of_the_passkey_task_has_a_table(project: Path, tmp_path: Path) -> None:
    table = ["report=lookup_table", f"results_dir={tmp_path}/results"]
    tiny = [text for text in TINY if text.startswith(("dims.", "recipe.", "parallel.", "scale."))]
    tiny += ["recipe.curriculum=null", "recipe.short_sequences=null", "recipe.segments_per_sequence=12"]
    tiny += ["recipe.long_history=null", "logger=none"]
    linear = ["reproduce", *table, *tiny, "report.run=[linear]", "task.examples=1"]
    once, again, shown = run(project, linear, linear, ["table", *table])
    assert all("Linear, copied" in printed for printed in (once, again, shown))
    (trained,), (evaluated,) = (records(tmp_path / "results", verb) for verb in ("train", "eval"))
    assert trained["task"] == evaluated["task"] == "lookup" and evaluated["parent"] == trained["run_id"]
    # A row may start from any task of running text, one that no module names included.
    (plan,) = run(project, ["reproduce", *table, "report.run=[started]", "plan=true"])
    assert "train letters," in plan and "train lookup," in plan
