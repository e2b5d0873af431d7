"""Standard streams as shells leave them: closed, without a reader, on a full disk, in another encoding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infini.system.process import in_encoding

FULL = Path("/dev/full")
STUB = """
import sys, types
from infini.cli import main as cli
from infini.config.compose import compose
from infini.runs import preflight

def run(cfg, overrides, **extra):
    print(f"seed {cfg.seed}", flush=True)
    open(f"made{cfg.seed}", "w").write("whole")

for name in ("train", "reproduce"):
    sys.modules[f"infini.runs.{name}"] = types.ModuleType(name)
    sys.modules[f"infini.runs.{name}"].run = run
preflight.begin_training = lambda cfg, overrides: None
sys.exit(cli.main(sys.argv[1:]))
"""
"""A program whose trainings take no time: they print a line, and make a file."""


def shell(line: str, root: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of bash in `folder`; $INFINI runs a command line, $STUB one whose trainings take no time."""
    (folder / "stub.py").write_text(STUB)
    set_here = {"PYTHONPATH": str(root), "INFINI": f"{sys.executable} {root / 'cli.py'}"}
    set_here["STUB"] = f"{sys.executable} {folder / 'stub.py'}"
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, **set_here, **environment},
        capture_output=True,
        timeout=120,
    )


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_a_table_is_printed_in_any_encoding(encoding: str, project_root: Path, tmp_path: Path) -> None:
    done = shell("$INFINI table", project_root, tmp_path, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode(encoding).splitlines()
    row = next(line for line in lines if line.startswith("Transformer-XL "))
    assert ("+/-" if encoding == "ascii" else "±") in row
    # The substitute of a mark may be longer; columns are still as wide in every row.
    rule = next(line for line in lines if line.startswith("----"))
    assert [place for place, mark in enumerate(row) if mark == "|"] == [
        place for place, mark in enumerate(rule) if mark == "+"
    ]


def test_what_an_encoding_does_not_have_is_not_lost() -> None:
    assert in_encoding("53.47 ± 0.2 — a\N{DAGGER}", "ascii") == "53.47 +/- 0.2 - a+"
    assert in_encoding("β日\udce9", "ascii") == "\\u03b2\\u65e5\\udce9"
    assert in_encoding("β日", "utf-8") == "β日"


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_stops_nothing_and_nothing_is_printed_into_a_file(
    closed: str, project_root: Path, tmp_path: Path
) -> None:
    done = shell(f"$STUB train seed=3 {closed}", project_root, tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "made3").read_text() == "whole"


def test_work_goes_on_without_its_reader(project_root: Path, tmp_path: Path) -> None:
    line = "$STUB train -m seed=1,2,3 2>&1 | head -1; echo ${PIPESTATUS[0]}"
    done = shell(line, project_root, tmp_path)
    assert done.stdout.splitlines() == [b"infini train seed=1", b"0"] and done.stderr == b""
    assert sorted(path.name for path in tmp_path.glob("made*")) == ["made1", "made2", "made3"]


def test_a_table_without_a_reader_is_still_written(project_root: Path, tmp_path: Path) -> None:
    done = shell("$INFINI table | head -1; echo ${PIPESTATUS[0]}", project_root, tmp_path)
    assert done.stdout.endswith(b"\n0\n") and done.stderr == b""
    assert (tmp_path / "outputs/results/tables/table2_lm_laptop.csv").is_file()


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_full_disk_below_standard_output_is_one_line_and_work_goes_on(project_root: Path, tmp_path: Path) -> None:
    lost = b"infini: error: standard output: No space left on device; what was printed is not complete\n"
    done = shell("$STUB train -m seed=1,2 > /dev/full", project_root, tmp_path)
    assert (done.returncode, done.stderr) == (2, lost)
    assert sorted(path.name for path in tmp_path.glob("made*")) == ["made1", "made2"]
    done = shell("$INFINI --help > /dev/full", project_root, tmp_path)
    assert (done.returncode, done.stderr) == (2, lost)
    done = shell("$INFINI nonsense 2> /dev/full", project_root, tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_working_folder_that_was_removed_is_one_line(project_root: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = shell("cd gone; rmdir ../gone; $INFINI table; $INFINI --version", project_root, tmp_path)
    said = b"infini: error: the working folder no longer exists"
    assert done.stderr.count(b"\n") == 1 and done.stderr.startswith(said)
    assert done.returncode == 0 and done.stdout.startswith(b"infini ")
