"""Run records: written whole or not at all, read back as they were, and honest about the tree they came from."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from infini import records
from infini.errors import InputError
from infini.records import RunRecord


def make_record(run_id: str = "run-1", **changes: object) -> RunRecord:
    """A small evaluation record."""
    content: dict[str, object] = {
        "run_id": run_id,
        "verb": "eval",
        "task": "pg19",
        "model": "infini_linear",
        "scale": "laptop",
        "seed": 1,
        "parent": None,
        "command": "infini eval task=pg19",
        "overrides": ["task=pg19"],
        "config": {"dims": {"segment_length": 256}},
        "config_hash": "0123456789ab",
        "started": "2024-05-01T12:00:00+00:00",
        "environment": {"git_revision": "a" * 40, "git_dirty": False},
        "results": {"perplexity": {"value": 12.5, "n": 100, "unit": "per token", "higher_is_better": False}},
    }
    return RunRecord(**{**content, **changes})  # type: ignore[arg-type]


def git(root: Path, *arguments: str) -> None:
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, env={**os.environ, **names})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    (root / ".gitignore").write_text("outputs/\n")
    (root / "code.py").write_text("x = 1\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def test_written_record_reads_back_equal(tmp_path: Path) -> None:
    record = make_record(documents=[{"name": "a", "tokens": 3, "nll": 1.25}], series={"gates": [[0.5, 0.25]]})
    path = records.write_record(record, tmp_path)
    assert path == tmp_path / "runs" / "run-1.json"
    assert records.read_record(path) == record
    assert records.load_records(tmp_path) == [record]


def test_numpy_values_and_paths_become_plain_json_and_nan_becomes_null() -> None:
    record = make_record(
        series={"curve": np.array([1.5, np.nan]), "n": np.int64(3), "one": np.float64(0.5), "where": Path("a/b")},
        cost={"wall_seconds": float("inf")},
    )
    read = json.loads(record.to_json())
    assert read["series"] == {"curve": [1.5, None], "n": 3, "one": 0.5, "where": "a/b"}
    assert read["cost"] == {"wall_seconds": None}


def test_value_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="a set"):
        make_record(series={"a": {1, 2}}).to_json()


def test_a_record_without_a_checksum_is_refused() -> None:
    written = json.loads(make_record().to_json())
    del written["sha256"]
    with pytest.raises(ValueError, match="it has no checksum"):
        records.RunRecord.from_json(json.dumps(written))


def test_a_record_as_written_is_checked_without_writing_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table reads hundreds. One whose lines an editor has joined is still the same record, or not."""
    written = make_record(cost={"n": 1234}).to_json()
    joined = json.dumps(json.loads(written))
    assert records.RunRecord.from_json(joined).to_json() == written
    with pytest.raises(ValueError, match="checksum mismatch"):
        records.RunRecord.from_json(joined.replace("1234", "1235"))
    monkeypatch.delattr(records, "_dumps")
    assert records.RunRecord.from_json(written).cost == {"n": 1234}


def test_no_temporary_file_stays_after_writing(tmp_path: Path) -> None:
    # One of this run is from a process that was killed at it; another run's may be at work.
    for name in (".run-1.json.0a1b2c3d.tmp", ".run-2.json.0a1b2c3d.tmp"):
        records.write_atomically(tmp_path / "runs" / name, b"{")
    records.write_record(make_record(), tmp_path)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"run-1.json", ".run-2.json.0a1b2c3d.tmp"}
    (tmp_path / "runs" / ".run-2.json.0a1b2c3d.tmp").unlink()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run-1.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failure_while_writing_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = records.write_record(make_record(), tmp_path)
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="disk full"):
        records.write_record(make_record(seed=2), tmp_path)
    with pytest.raises(OSError, match="disk full"):
        records.write_record(make_record("run-2"), tmp_path)
    assert [entry.name for entry in path.parent.iterdir()] == ["run-1.json"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_reading_is_not_interrupted_by_the_garbage_collector_and_leaves_it_as_it_was(
    enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, read, meanwhile = gc.isenabled(), records.read_record, []

    def watched(path: Path) -> RunRecord:
        meanwhile.append(gc.isenabled())
        return read(path)

    monkeypatch.setattr(records, "read_record", watched)
    path = records.write_record(make_record(), tmp_path)
    try:
        (gc.enable if enabled else gc.disable)()
        records.load_records(tmp_path)
        assert gc.isenabled() == enabled and meanwhile == [False]
        path.write_text("{", encoding="utf-8")
        with pytest.raises(InputError, match="damaged"):
            records.load_records(tmp_path)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"schema": 1, "run_', "Unterminated string"),
        (b"", "Expecting value"),
        (b"[]", "not a JSON object"),
        (b'{"schema": 2}', "reads schema 1"),
        (b'{"schema": 1}', "missing or unknown fields: command"),
        (b"\xff\xfe", "decode"),
        (make_record("damaged", documents={}).to_json().encode(), "'documents' holds a dict"),
        (make_record("damaged", results={"perplexity": 3}).to_json().encode(), "result 'perplexity' has no value"),
        (make_record("damaged", results={"perplexity": {"value": "3"}}).to_json().encode(), "'perplexity' has no"),
        (make_record("damaged", documents=[3]).to_json().encode(), "'documents' has an entry that is not an object"),
        (b"[" * 200_000, "recursion"),
        (make_record("other").to_json().encode(), "it holds run 'other'"),
        # One digit of a number: still JSON, still a record.
        (make_record("damaged", cost={"n": 1234}).to_json().replace("1234", "1235").encode(), "checksum"),
        (make_record("damaged").to_json().replace('"seed": 1,', '"seed": 3,').encode(), "checksum"),
    ],
)
def test_damaged_record_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "runs" / "damaged.json"
    records.write_atomically(path, content)
    with pytest.raises(InputError, match=re.escape(str(path))) as raised:
        records.load_records(tmp_path)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_records_load_oldest_first_and_a_missing_folder_is_empty(tmp_path: Path) -> None:
    assert records.load_records(tmp_path / "nowhere") == []
    records.write_record(make_record("a", started="2024-05-02T00:00:00+00:00"), tmp_path)
    records.write_record(make_record("b", started="2024-05-01T00:00:00+00:00"), tmp_path)
    assert [record.run_id for record in records.load_records(tmp_path)] == ["b", "a"]


def test_run_ids_are_unique_and_safe_as_file_names(tmp_path: Path) -> None:
    ids = {records.new_run_id("eval", "pg19", "a=b/c d", 1) for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", run_id) for run_id in ids)
    with pytest.raises(InputError, match=r"run_id='\.\./escape'"):
        records.write_record(make_record("../escape"), tmp_path)


def test_clean_tree_is_clean_and_ignored_files_do_not_count(repository: Path) -> None:
    (repository / "outputs").mkdir()
    (repository / "outputs" / "model.bin").write_text("x")
    revision, dirty = records.git_state(repository)
    assert revision is not None
    assert re.fullmatch("[0-9a-f]{40}", revision)
    assert dirty is False


def test_what_publishing_wrote_does_not_make_the_tree_dirty(repository: Path) -> None:
    (repository / "results" / "runs").mkdir(parents=True)
    (repository / "results" / "runs" / "new.json").write_text("{}")
    assert records.git_state(repository)[1] is False


@pytest.mark.parametrize(("name", "staged"), [("code.py", False), ("code.py", True), ("new.py", False)])
def test_changed_staged_and_new_files_make_the_tree_dirty(repository: Path, name: str, staged: bool) -> None:
    (repository / name).write_text("x = 2\n")
    if staged:
        git(repository, "add", name)
    assert records.git_state(repository)[1] is True


def test_the_users_own_files_do_not_make_the_tree_dirty(repository: Path) -> None:
    """Books beside the code; a new module in it does, and is named."""
    (repository / "my_books").mkdir()
    for name in ("book.txt", "my_books/one.txt"):
        (repository / name).write_text("text")
    assert records.git_state(repository)[1] is False
    assert "git_changes" not in records.environment(repository)
    (repository / "tasks" / "mine").mkdir(parents=True)
    for name in ("tasks/mine/a.py", "tasks/mine/b.py", "new.py", "code.py"):
        (repository / name).write_text("x = 2\n")
    found = records.environment(repository)
    assert found["git_dirty"] and found["git_changes"] == ["code.py", "new.py", "tasks/mine/a.py"]
    assert records.describe_changes(found) == " (code.py, new.py, tasks/mine/a.py)"
    assert records.describe_changes({"git_dirty": True}) == ""


def test_a_commit_that_is_checked_out_meanwhile_is_not_that_of_a_run(repository: Path) -> None:
    """A process that reproduces a table for hours has the code that it was started with."""
    started, dirty = records.git_state(repository)
    assert dirty is False
    for folder in ("results", "docs", "tests"):
        (repository / folder).mkdir()
        (repository / folder / "page.md").write_text("new")
        git(repository, "add", folder)
        git(repository, "commit", "-q", "-m", f"{folder} alone: no run depends on them")
    assert records.git_state(repository) == (started, False)
    (repository / "code.py").write_text("x = 2\n")
    git(repository, "commit", "-q", "-a", "-m", "other code")
    found = records.environment(repository)
    assert (found["git_revision"], found["git_dirty"], found["git_changes"]) == (started, True, ["code.py"])


def test_no_repository_of_its_own_means_no_commit(repository: Path, tmp_path: Path) -> None:
    inside = repository / "site-packages"
    inside.mkdir()
    assert records.git_state(inside) == (None, None)
    assert records.git_state(tmp_path) == (None, None)


def test_a_hook_of_another_repository_does_not_answer_for_ours(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = records.git_state(repository)
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert records.git_state(repository) == expected


def test_environment_is_complete(repository: Path) -> None:
    found = records.environment(repository)
    assert found["git_dirty"] is False
    assert set(found["hardware"]) == {"cpu", "cores", "memory_gb", "accelerator", "has_amx"}
    assert found["hardware"]["cpu"]
    assert found["hardware"]["cores"] >= 1
    assert found["versions"]["numpy"] == np.__version__


def test_parts_of_another_checkout_make_a_run_dirty(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable installation of another checkout is such a case: the commit would not be that of the code."""
    monkeypatch.setattr(records, "SOURCE_ROOT", repository)
    place = repository / "conf"
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(place)])
    )
    assert records.environment(repository)["git_dirty"] is False
    place = repository.parent / "conf"
    found = records.environment(repository)
    assert found["git_dirty"] and found["git_changes"][0] == str(place.resolve())


def test_environment_does_not_load_torch() -> None:
    code = "import sys; from infini import records; records.environment(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=records.SOURCE_ROOT).returncode == 0
