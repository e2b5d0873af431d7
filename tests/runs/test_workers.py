"""Several processes that run `infini reproduce` with one results folder share its runs; a plan lists them."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import re
import signal
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from command_runner import Runner, read_by
from killed import server
from report_runs import make_train
from rich.console import Console
from tiny_runs import TINY

from infini import records
from infini.cli import main as cli
from infini.config.compose import compose
from infini.errors import BusyError, InputError
from infini.records import RunRecord
from infini.runs import workers
from infini.runs.workers import Worker
from infini.system.paths import is_locked, lock_file

ROWS = ["report=table2_lm", "task=pg19", "model=local,infini_linear"]


def at_once(folder: Path, *lines: list[str], killed: int = 0) -> list[tuple[int, str]]:
    """Exit code and output of command lines that run at once. The first `killed` kill themselves in their second
    step."""
    given, taken = server().stdin, server().stdout
    assert given is not None and taken is not None
    asked = []
    for number, line in enumerate(lines):
        moment, when = ("in a step", 2) if number < killed else ("never", 1)
        asked.append({"moment": moment, "when": when, "words": line, "environment": dict(os.environ)})
        asked[-1] |= {"folder": str(folder), "output": str(folder / f"output{number}")}
    print(json.dumps(asked), file=given, flush=True)
    codes = json.loads(taken.readline())
    return [(code, (folder / f"output{number}").read_text("utf-8")) for number, code in enumerate(codes)]


def command(corpus: Path, results: Path, *words: str) -> list[str]:
    settings = [*TINY, "logger=none", "recipe.save_every=1", f"task.data_dir={corpus}", f"results_dir={results}"]
    return ["reproduce", *read_by(["reproduce", *ROWS], settings), *ROWS, *words]


def of_seeds(*seeds: int) -> list[tuple[str, str, int]]:
    """The runs of the rows above."""
    return [(*run, seed) for run in product(("eval", "train"), ("infini_linear", "local")) for seed in seeds]


def made(results: Path) -> list[tuple[str, str, int]]:
    return sorted((run.verb, run.model, run.seed) for run in records.load_records(results))


@pytest.mark.slow
def test_four_processes_share_the_runs_of_a_table_and_take_over_those_of_two_that_were_killed(
    corpus: Path, tmp_path: Path
) -> None:
    # There are as many trainings as processes: each killed one has its own.
    words = command(corpus, tmp_path / "results", "seed=1,2")
    *killed, first, second = at_once(tmp_path, *[words] * 4, killed=2)
    assert [code for code, _ in killed] == [-signal.SIGKILL] * 2, killed
    assert made(tmp_path / "results") == of_seeds(1, 2)
    for code, said in (first, second):
        assert code == 0 and "Local attention only" in said and "Infini-Transformer (Linear)" in said, said
    assert not list((tmp_path / "results" / "unfinished").glob("*"))


@pytest.mark.slow
def test_two_processes_share_the_runs_of_two_seeds(corpus: Path, tmp_path: Path) -> None:
    words = command(corpus, tmp_path / "results", "seed=1,2")
    outputs = at_once(tmp_path, words, words)
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert made(tmp_path / "results") == of_seeds(1, 2)
    assert all("trained 2" in said for _, said in outputs), "each trains a part"


def test_a_waiting_process_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs a and c are another's; c is done first."""
    locks = {name: lock_file(tmp_path / name, "busy") for name in "ac"}
    done: list[str] = []

    def job(name: str) -> str:
        lock_file(tmp_path / name, "busy").close()
        done.append(name)
        return name.upper()

    def sleep(seconds: float) -> None:
        locks.pop("c" if len(locks) == 2 else "a").close()

    monkeypatch.setattr(workers.time, "sleep", sleep)
    jobs = [(f"job {name}", functools.partial(job, name)) for name in "abcd"]
    assert Worker(Console(width=200)).do_all(jobs) == ["A", "B", "C", "D"]
    assert done == ["b", "d", "c", "a"]
    assert capsys.readouterr().out.splitlines() == [
        "waiting for other processes, which run job a; job c",
        "waiting for other processes, which run job a",
    ]


def test_a_job_that_stays_busy_without_a_lock_is_tried_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def job() -> int:
        if len(slept) < 3:
            raise BusyError("busy", tmp_path / "none")
        return 7

    monkeypatch.setattr(workers.time, "sleep", slept.append)
    assert Worker(Console(quiet=True)).do_all([("job", job)]) == [7] and len(slept) == 3


def test_a_run_that_another_process_ended_meanwhile_is_not_made_again(tmp_path: Path) -> None:
    cfg = compose([f"results_dir={tmp_path}"])
    record: Any = object()
    worker = Worker(Console(quiet=True))
    assert worker.make("train", cfg, None, lambda: record, pytest.fail) is record
    assert worker.make("train", cfg, None, lambda: None, lambda: record) is record

    def twice() -> RunRecord:
        with pytest.raises(BusyError):
            worker.make("train", cfg, None, lambda: None, pytest.fail)
        # Another training, and an evaluation of the first.
        assert worker.make("train", compose([f"results_dir={tmp_path}", "seed=2"]), None, lambda: None, lambda: record)
        return worker.make("eval", cfg, "a", lambda: None, lambda: record)

    assert worker.make("train", cfg, None, lambda: None, twice) is record
    assert not list((tmp_path / "unfinished").iterdir())


def test_without_locks_a_caller_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some disks of clusters have none."""

    def without(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    path = tmp_path / "made" / "lock"
    with pytest.raises(InputError, match=rf"^{path}: cannot be locked \(No locks available\)$"):
        lock_file(path, "busy")
    with lock_file(path, "busy", required=False) as file:
        assert path.is_file() and not file.closed


def test_a_lock_outlives_the_removal_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening and the locking of its file, and whoever locks it."""
    real = fcntl.flock
    for required in (True, False):
        path, times = tmp_path / str(required) / "lock", [1]

        def locking(file: Any, how: int, path: Path = path, times: list[int] = times) -> None:
            if times:
                times.clear()
                path.unlink()
                path.parent.rmdir()
            real(file, how)

        monkeypatch.setattr(fcntl, "flock", locking)
        with lock_file(path, "busy", required=required):
            monkeypatch.setattr(fcntl, "flock", real)
            assert is_locked(path)
            with pytest.raises(BusyError, match=f"^{tmp_path}: busy"):
                lock_file(path, "busy", required=required, named=tmp_path)


def test_a_lock_is_of_the_file_that_has_the_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with lock_file(path, "busy"):
        assert is_locked(path)
        with pytest.raises(BusyError, match=f"{path}: busy"):
            lock_file(path, "busy")
        path.unlink()
        # A new file of this name is another lock.
        with lock_file(path, "busy"):
            assert is_locked(path)
    assert not is_locked(path) and path.exists()
    with lock_file(path, "", shared=True), lock_file(path, "", shared=True), pytest.raises(BusyError):
        assert is_locked(path)
        lock_file(path, "")


@pytest.mark.usefixtures("elsewhere", "clock")
def test_a_plan_lists_what_is_missing_and_starts_nothing(
    infini: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = [*ROWS, "seed=1,2", "plan=true"]
    infini("reproduce", *plan)
    lines = infini.out.splitlines()
    rows = {"infini_linear": "Infini-Transformer (Linear)", "local": "Local attention only"}
    cells = [(seed, model, f"pg19, {title}, seed {seed}") for seed in (1, 2) for model, title in rows.items()]
    runs = [(verb, *cell) for cell in cells for verb in ("train", "eval")]
    assert len(lines) == 9 and not infini.results.exists()
    for number, (line, (verb, seed, model, cell)) in enumerate(zip(lines, runs, strict=False), 1):
        after = "" if verb == "train" else f", after {number - 1}"
        assert line == f"{number:>3}      unknown  {verb} pg19, {model}, seed {seed}{after} ({cell})"
    assert lines[-1] == "4 trainings and 4 evaluations to run; 0 cells filled"
    infini("train", "model=local")
    infini("reproduce", *ROWS, "model=infini_linear")
    before = infini.records()
    infini("reproduce", *plan)
    lines = infini.out.splitlines()
    # `local` has no recorded evaluation.
    assert lines[0] == f"  1      unknown  eval pg19, local, seed 1 ({cells[1][2]})"
    assert len(lines) == 7 and re.match(r"  3 +\d+ s  eval pg19, infini_linear, seed 2, after 2", lines[2])
    assert lines[-2] == "2 trainings and 3 evaluations to run; 1 cell filled"
    left = r"\d+ s in one process, without 2 runs of unknown time, as such runs took"
    assert re.fullmatch(left, lines[-1])
    assert infini.records() == before
    # Published runs tell how long others took, perhaps on another machine.
    monkeypatch.setattr(records, "published_dir", lambda: infini.results)
    infini("reproduce", *plan, f"results_dir={tmp_path / 'none yet'}")
    lines = infini.out.splitlines()
    assert re.match(r"  1 +\d+ s\*  train pg19, infini_linear, seed 1 ", lines[0])
    assert lines[-1].endswith(", as such runs took (* a published run, on its machine)")


def test_the_cells_of_a_table_read_each_record_once(
    infini: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of 48 cells had read a thousand records 146 times."""
    infini("reproduce", *ROWS, "model=infini_linear")
    infini("train", "model=local")
    monkeypatch.setattr(records, "published_dir", lambda: tmp_path / "none")
    read: list[str] = []
    whole = records._read
    monkeypatch.setattr(records, "_read", lambda path: (read.append(path.stem), whole(path))[1])
    infini("reproduce", *ROWS, "seed=1,2,3", "plan=true")
    # The time that a run takes is looked up after all cells.
    assert sorted(read) == sorted(2 * [record.run_id for record in infini.records()])


def test_a_run_holds_no_records_that_its_table_has_read(tmp_path: Path) -> None:
    """They would be part of its peak of memory. A training reads all trainings, to see whether one diverged."""
    cfg = compose([f"results_dir={tmp_path}"])
    path = records.write_record(make_train("local", 1), tmp_path)
    worker = Worker(Console(quiet=True))

    def made() -> RunRecord:
        first = records.read_record(path)
        assert records.read_record(path) is not first
        return first

    def job() -> RunRecord:
        first = records.read_record(path)
        assert records.read_record(path) is first
        of_run = worker.make("train", cfg, None, lambda: None, made)
        again = records.read_record(path)
        assert first is not of_run is not again is not first
        assert records.read_record(path) is again
        # A record that was written again is read again.
        changed = replace(first, seed=7)
        records.write_record(changed, tmp_path)
        assert records.read_record(path) == changed
        return changed

    worker.do_all([("job", job)])
    assert records.read_record(path) is not records.read_record(path)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (
            ["report=table3_passkey", "scale=gpu", "report.run=[linear_zero_shot,linear_finetuned]"],
            [
                "train pg19, infini_linear, seed 1",
                "train passkey, infini_linear, seed 1, after 1",
                "eval passkey, infini_linear, seed 1, after 2",
                "eval passkey, infini_linear, seed 1, after 1",
            ],
        ),
        (["report=lr_search", "task=pg19", "model=local"], ["train pg19, local, seed 1"] * 2),
        (
            ["report=table4_booksum", "task.data_dir=synthetic", "report.run=[lead,infini_linear]"],
            [
                "train booksum, infini_linear, seed 1",
                "eval booksum, infini_linear, seed 1, after 1",
                "eval booksum, lead, seed 1",
            ],
        ),
    ],
    ids=["a training that two rows start from", "a search", "summaries"],
)
def test_every_kind_of_report_has_a_plan(
    words: list[str],
    runs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # It may be made where there is no GPU.
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["reproduce", *words, "plan=true", f"results_dir={tmp_path / 'results'}"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    made_up = "task.data_dir=synthetic" in words
    if made_up:
        assert last.startswith("made-up text says nothing about the models: set INFINI_DATA_DIR or task.data_dir")
        last = lines.pop()
    assert all(line.endswith(", made-up text)") == made_up for line in lines)
    assert [line[5:].lstrip().removeprefix("unknown  ").partition(" (")[0] for line in lines] == runs
    trainings = sum(run.startswith("train") for run in runs)
    assert last.startswith(f"{trainings} training") and not (tmp_path / "results").exists()
