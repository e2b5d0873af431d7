"""docs/how-to/extending.md works as written: its model, in a copy of the project, passes the conformance tests, trains,
and is evaluated, tabulated, drawn and measured by every command that knows models."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from books import write_books
from command_runner import read_by
from installed import environment_of, installed_copy
from tiny_runs import SUMMARIES, TINY, write_corpus


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the page's model in it."""
    root = Path(__file__).resolve().parents[2]
    copy = installed_copy(root, tmp_path_factory.mktemp("extended"))
    shutil.copytree(root / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", copy)
    page = (root / "docs" / "how-to" / "extending.md").read_text(encoding="utf-8")
    files = re.findall(r"`([a-z/]+gru\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == ["infini/models/gru.py", "conf/model/gru.yaml"]
    for name, content in files:
        (copy / "infini" / name.removeprefix("infini/")).write_text(content, encoding="utf-8")
    # The row that the page adds to a table.
    row = re.search(r"in `(conf/report/[a-z0-9_]+\.yaml)`, under `models`, `(gru: GRU)`", page)
    assert row is not None
    report = copy / "infini" / row[1]
    content = report.read_text(encoding="utf-8")
    assert content.count("\nmodels:\n") == 1
    report.write_text(content.replace("\nmodels:\n", f"\nmodels:\n  {row[2]}\n"), encoding="utf-8")
    return copy


def run(copy: Path, *command: str) -> str:
    call = [sys.executable, *command]
    done = subprocess.run(call, cwd=copy, env=environment_of(copy), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_pages_model_passes_the_conformance_tests(extended: Path) -> None:
    out = run(extended, "-m", "pytest", "-q", "tests/models/test_conformance.py", "-k", "gru", "-p", "no:cacheprovider")
    assert int(re.search(r"(\d+) passed", out)[1]) >= 26, out  # type: ignore[index]


COMMANDS = """
import contextlib, io, json, sys
from infini.cli import main as cli
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(words)
    assert code == 0, words
    print(json.dumps([words[0], out.getvalue()]))
"""
"""Command lines, one after the other in one process: to import torch takes longer than each of them."""


def run_all(copy: Path, lines: list[list[str]]) -> dict[str, str]:
    """The last line that each verb printed."""
    taken = [[word for word in words if "=" not in word] + read_by(words, words[1:]) for words in lines]
    told = run(copy, "-c", COMMANDS, json.dumps(taken)).splitlines()
    return dict(json.loads(line) for line in told)


def records(results: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in (results / "runs").glob("*.json")]


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A training on a few pages, and what is kept of it."""
    corpus = write_corpus(tmp_path / "data")
    return [*TINY, "model=gru", "logger=none", f"results_dir={tmp_path}/results", f"task.data_dir={corpus}"]


@pytest.mark.slow
def test_the_pages_model_is_evaluated_on_every_task(extended: Path, settings: list[str], tmp_path: Path) -> None:
    """Trained with all that recipes add, and measured by all that evaluations measure."""
    keys = ["task=passkey", "recipe.curriculum=null", "recipe.batch_size=1", "recipe.segments_per_sequence=12"]
    keys += ["recipe.short_sequences=null", "recipe.length_extension=100", "recipe.long_history=[2,2]"]
    keys += ["recipe.sparse_writes=0.1", "task.examples=1"]
    books = write_books(tmp_path / "books")
    summaries = ["task=booksum", *SUMMARIES, *settings[len(TINY) : -1], f"task.data_dir={books}"]
    lines = [
        ["train", *settings],
        ["eval", *settings, "scale.knockouts=true"],
        ["train", *settings, *keys],
        ["eval", *settings, *keys, "length=192", "depth=start"],
        ["eval", *settings, *keys, "length=192", "depth=start", "task.knockout=reset"],
        ["train", *summaries],
        ["eval", *summaries, "length=64"],
    ]
    run_all(extended, lines)
    made = records(tmp_path / "results")
    evaluated = [(run["task"], run["config"]["task"].get("knockout")) for run in made if run["verb"] == "eval"]
    assert len(evaluated) == 4
    assert set(evaluated) == {("booksum", None), ("passkey", "none"), ("passkey", "reset"), ("pg19", None)}
    # The model is not measured on what it lacks.
    for each in made:
        assert not {"half_dilution", "foreign_delta", "reset_delta"} & set(each["results"])
        assert "gates" not in each["series"]


@pytest.mark.slow
def test_the_pages_model_is_known_to_every_command(extended: Path, settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("A dog runs. " * 50, encoding="utf-8")
    summaries = ["task=booksum", *SUMMARIES, *settings[len(TINY) : -1]]
    bench = ["suite.models=[local,gru]", "suite.repeats=1", "suite.stream_short_tokens=64", "suite.stream_tokens=128"]
    bench += ["suite.agreement_tokens=20", "suite.decode_tokens=3", "suite.decode_short_tokens=20"]
    lines = [
        ["train", *settings],
        ["eval", *settings],
        ["generate", *settings, "prompt=abc", "decoding.max_new_tokens=5", "decoding.temperature=1"],
        ["table", *settings, "report=table2_lm"],
        ["figure", *settings, "report=table2_lm"],
        ["train", *summaries, f"task.data_dir={write_books(tmp_path / 'books')}"],
        ["summarize", str(tmp_path / "book.txt"), *settings[len(TINY) : -1], "decoding.max_new_tokens=4"],
        ["bench", *(text for text in settings if text != "model=gru"), *bench, "suite.decode_long_tokens=40"],
    ]
    said = run_all(extended, lines)
    assert said["generate"].strip() and said["summarize"].strip() and "GRU" in said["table"]
    (timed,) = (run for run in records(tmp_path / "results") if run["verb"] == "bench")
    assert set(timed["series"]["train"]["models"]) == {"local", "gru"}
    assert "tie_embeddings=true" in run(extended, "-m", "infini", "train", "model=gru", "--help")
