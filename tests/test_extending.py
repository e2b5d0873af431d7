"""docs/extending.md works as written: its model, in a copy of the project, trains and passes the conformance tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import TINY, write_corpus


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the page's model in it."""
    root = Path(__file__).resolve().parent.parent
    copy = tmp_path_factory.mktemp("extended")
    for name in ("infini", "tasks", "conf", "tests"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cli.py", "pyproject.toml"):
        shutil.copy(root / name, copy / name)
    page = (root / "docs" / "extending.md").read_text(encoding="utf-8")
    files = re.findall(r"`([a-z/]+gru\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == ["infini/models/gru.py", "conf/model/gru.yaml"]
    for name, content in files:
        (copy / name).write_text(content, encoding="utf-8")
    return copy


def run(copy: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_pages_model_passes_the_conformance_tests(extended: Path) -> None:
    out = run(extended, "-m", "pytest", "-q", "tests/test_conformance.py", "-k", "gru", "-p", "no:cacheprovider")
    assert int(re.search(r"(\d+) passed", out)[1]) >= 26, out  # type: ignore[index]


@pytest.mark.slow
def test_the_pages_model_trains_and_goes_on(extended: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    settings = ["model=gru", f"results_dir={tmp_path}/results", f"task.data_dir={tmp_path}/data"]
    settings = [*TINY, "logger=none", *settings]
    run(extended, "cli.py", "train", *settings)
    run(extended, "cli.py", "eval", *settings)
    assert run(extended, "cli.py", "generate", *settings, "prompt=abc", "decoding.max_new_tokens=5").strip()
    assert "tie_embeddings=true" in run(extended, "cli.py", "train", "model=gru", "--help")
