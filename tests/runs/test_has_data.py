"""Whether the texts of tasks are there, before hours of benches and not after them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import write_corpus

from infini.runs import common, has_data


def test_missing_texts_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "reachable", lambda: False)
    # Other tests leave texts of the hub in the folder that they share.
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("INFINI_DATA_DIR", raising=False)
    assert has_data.main(["pg19", "booksum"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["pg19", "booksum"]


def test_texts_in_a_folder_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(common, "reachable", lambda: False)
    write_corpus(tmp_path / "pg19")
    monkeypatch.setenv("INFINI_DATA_DIR", str(tmp_path))
    assert has_data.main(["pg19"]) == 0


def test_make_gpu_looks_for_texts_first() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    tests = next(line for line in makefile.splitlines() if line.startswith("$(GPU)/tests:"))
    assert "$(GPU)/data" in tests
