"""Folders for files that are not complete yet."""

from __future__ import annotations

import os
import time
from pathlib import Path

from infini.system.paths import DAY, scratch_folder


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
