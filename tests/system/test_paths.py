"""Folders for files that are not complete yet, and places where files can be written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from infini.errors import InputError
from infini.system.paths import DAY, check_place, scratch_folder


def test_what_killed_processes_left_is_removed_after_a_day(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as made:
        old, new = made.with_name(f"{made.name}-old"), made.with_name(f"{made.name}-new")
    assert not made.exists()
    for folder, age in ((old, DAY + 60), (new, DAY - 60)):
        folder.mkdir()
        (folder / "tokens.arrow").write_bytes(b"half")
        for path in (folder / "tokens.arrow", folder):
            os.utime(path, times=(time.time() - age,) * 2)
    (tmp_path / "tokens.arrow").write_bytes(b"whole")
    with scratch_folder(tmp_path) as made:
        assert sorted(tmp_path.iterdir()) == sorted([made, new, tmp_path / "tokens.arrow"])


@pytest.mark.parametrize(
    ("name", "tried"), [("there", "there"), ("there/new", "there"), ("new/newer", "."), ("file", "."), ("new", ".")]
)
def test_a_place_is_tried_where_it_will_be_written(
    name: str, tried: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that exists may be writable where its parent is not, or the other way round."""
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    folders = []

    def refused(*, dir: Path) -> None:
        folders.append(dir)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(InputError, match=r"^out='.*': .* is not writable \(Permission denied\)$"):
        check_place("out", tmp_path / name)
    assert folders == [tmp_path / tried]
