"""Trainings that are stopped at any moment: checkpoints to resume from, damaged checkpoints, real kills."""

from __future__ import annotations

import fcntl
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import one_in
from tiny_runs import STEPS, outcome, words

from infini import records
from infini.cli import main as cli
from infini.config.compose import compose
from infini.errors import InputError
from infini.records import RunRecord
from infini.runs import train as train_command
from infini.runs.publish import check_publishable
from infini.training import resume
from infini.training.module import LanguageModelModule
from infini.training.resume import UnfinishedRun, random_states, set_random_states


def train(corpus: Path, results: Path) -> RunRecord:
    overrides = words(corpus, results)
    return train_command.train(compose(overrides), overrides)


def stop_in(patch: pytest.MonkeyPatch, step: int) -> None:
    real = LanguageModelModule.training_step

    def stopping(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step + 1 == step:
            raise KeyboardInterrupt
        return real(self, batch, index)

    patch.setattr(LanguageModelModule, "training_step", stopping)


def stopped_training(corpus: Path, results: Path, step: int = STEPS) -> list[Path]:
    """Points of a training that was stopped in a step, the newest last."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_in(patch, step)
        train(corpus, results)
    return sorted(results.glob("unfinished/*/step-*.ckpt"))


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes]:
    results = tmp_path_factory.mktemp("straight")
    train(corpus, results)
    return outcome(results)


def test_two_points_are_kept_and_carry_their_checksum(corpus: Path, tmp_path: Path) -> None:
    checkpoints = stopped_training(corpus, tmp_path)
    assert [path.name.split("-")[1] for path in checkpoints] == ["00000004", "00000006"]
    for path in checkpoints:
        assert path.stem.split("-")[2] == resume.sha256_of(path)
    assert not list(tmp_path.glob("unfinished/*/.*.partial"))


def test_a_stop_says_where_it_goes_on(corpus: Path, tmp_path: Path) -> None:
    for step, said in ((2, "the same command starts again"), (6, "is of step 4"), (5, "is of step 4")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt, match=said):
            stop_in(patch, step)
            train(corpus, tmp_path)


def test_a_stop_before_the_first_step_knows_the_checkpoint(corpus: Path, tmp_path: Path) -> None:
    stopped_training(corpus, tmp_path)
    # A shell starts what runs in the background with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(KeyboardInterrupt, match="the same command resumes from it"),
        ):
            patch.setattr(LanguageModelModule, "on_load_checkpoint", lambda *_: signal.raise_signal(signal.SIGINT))
            train(corpus, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_lost_process_says_nothing_against_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """The user was told to remove it."""
    stopped_training(corpus, tmp_path)

    def lose(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModelModule, "on_load_checkpoint", lose)
        with pytest.raises(RuntimeError, match="Connection closed by peer") as caught:
            train(corpus, tmp_path)
    assert not isinstance(caught.value, InputError)
    assert train(corpus, tmp_path).cost["resumed"]


@pytest.mark.parametrize("what", ["state_dict", "infini", "optimizer_states"])
def test_a_checkpoint_of_another_version_is_one_line(
    corpus: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_training(corpus, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        load = torch.load

        def other(*arguments: Any, **options: Any) -> Any:
            checkpoint = load(*arguments, **options)
            checkpoint[what] = [{"state": {}, "param_groups": []}] if what == "optimizer_states" else {"other": 1}
            return checkpoint

        patch.setattr(torch, "load", other)
        with pytest.raises(InputError, match=r"step-00000006-.*does not fit this version .* remove .* start .* again"):
            train(corpus, tmp_path)
    capsys.readouterr()
    resumed = train(corpus, tmp_path)
    assert resumed.cost["resumed"]
    # The id that the first process printed, not that of the second, which exists nowhere.
    said = capsys.readouterr().err
    assert re.search(r"^resuming from step \d of \d+ \(.*unfinished/[\w-]+\)$", said, re.MULTILINE)
    assert re.findall(r"^(\S+): .* parameters on cpu", said, re.MULTILINE) == [resumed.run_id]
    assert set(re.findall(r"\d{8}T\d{6}Z-train-[\w-]+", said)) == {resumed.run_id}


@pytest.mark.gpu
def test_a_training_on_a_gpu_resumes(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums on a GPU may be taken in another order each time: the losses agree to that."""
    monkeypatch.setitem(
        globals(), "words", lambda *folders, words=words: [*words(*folders), "parallel.accelerator=gpu"]
    )
    train(corpus, tmp_path / "straight")
    stopped_training(corpus, tmp_path / "stopped")
    assert train(corpus, tmp_path / "stopped").cost["resumed"]
    curves = [outcome(tmp_path / name)[0] for name in ("straight", "stopped")]
    np.testing.assert_allclose(np.array(curves[1]), np.array(curves[0]), rtol=1e-3)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, truncate, empty])
@pytest.mark.parametrize("how_many", [1, 2])
def test_a_damaged_checkpoint_is_skipped(
    corpus: Path,
    tmp_path: Path,
    straight: tuple[Any, bytes],
    damage: Callable[[Path], None],
    how_many: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoints = stopped_training(corpus, tmp_path)
    for path in checkpoints[-how_many:]:
        damage(path)
    record = train(corpus, tmp_path)
    err = capsys.readouterr().err.replace("\n", "")
    assert all(path.name in err for path in checkpoints[-how_many:])
    assert (f"resuming from step {resume.step_of(checkpoints[0])} of {STEPS} (" in err) is (how_many == 1)
    assert err.count("damaged, skipped") == how_many
    assert record.cost["resumed"] is (how_many == 1)
    assert outcome(tmp_path) == straight


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
"""torch's message where an allocation fails."""


def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(
    corpus: Path, tmp_path: Path, straight: tuple[Any, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that fails for a moment, and a machine whose memory others use, leave it as good as it was."""
    checkpoints = stopped_training(corpus, tmp_path)
    failing = OSError(5, "Input/output error"), PermissionError(13, "Permission denied")
    full = MemoryError(), RuntimeError(NO_MEMORY)
    for (place, name), error in product([(resume, "sha256_of"), (torch, "load")], [*failing, *full]):
        with pytest.MonkeyPatch.context() as patch:

            def fails(*_: Any, error: Exception = error, **__: Any) -> Any:
                raise error

            patch.setattr(place, name, fails)
            capsys.readouterr()
            assert cli.main(["train", *words(corpus, tmp_path)]) == cli.USAGE_ERROR
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("infini: ")]
        said = f"{checkpoints[-1]}: cannot be read ({error.strerror})" if isinstance(error, OSError) else "fit into mem"
        assert said in line
        assert sorted(tmp_path.glob("unfinished/*/step-*")) == checkpoints
    assert train(corpus, tmp_path).cost["resumed"]
    assert outcome(tmp_path) == straight


def test_an_error_on_the_way_to_a_resume_is_not_blamed_on_the_checkpoint(
    corpus: Path, tmp_path: Path, straight: tuple[Any, bytes]
) -> None:
    """The user would remove hours of work."""
    stopped_training(corpus, tmp_path)
    full = RuntimeError(NO_MEMORY), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), MemoryError()
    for error in (*full, OSError(5, "Input/output error"), InputError("task.data_dir='x': is gone")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)) as raised:

            def fails(*_: Any, error: Exception = error) -> Any:
                raise error

            patch.setattr(LanguageModelModule, "on_load_checkpoint", fails)
            train(corpus, tmp_path)
        assert raised.value is error
    assert train(corpus, tmp_path).cost["resumed"]
    assert outcome(tmp_path) == straight


def test_a_training_does_not_resume_where_another_model_led(corpus: Path, tmp_path: Path) -> None:
    """The folder that init_from names holds other weights by now."""
    overrides = words(corpus, tmp_path)
    folders = []
    for seed in (1, 2):
        mine = [*words(corpus, tmp_path / str(seed)), f"seed={seed}"]
        train_command.train(compose(mine), mine)
        folders += list((tmp_path / str(seed) / "checkpoints").iterdir())
    start = tmp_path / "start"
    shutil.copytree(folders[0], start)
    overrides = [*words(corpus, tmp_path / "r"), f"init_from={start}"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_in(patch, STEPS)
        train_command.train(compose(overrides), overrides)
    assert list(tmp_path.glob("r/unfinished/*/step-*.ckpt"))
    shutil.rmtree(start)
    shutil.copytree(folders[1], start)
    run = train_command.train(compose(overrides), overrides)
    assert not run.cost["resumed"]
    straight = [*words(corpus, tmp_path / "s"), f"init_from={start}"]
    assert train_command.train(compose(straight), straight).series["loss_curve"] == run.series["loss_curve"]


def test_new_points_are_kept_after_a_restart_past_damaged_ones(
    corpus: Path, tmp_path: Path, straight: tuple[Any, bytes]
) -> None:
    for path in stopped_training(corpus, tmp_path):
        flip(path)
    # Both are of later steps than the next checkpoint.
    checkpoints = stopped_training(corpus, tmp_path, step=4)
    assert [path.name.split("-")[1] for path in checkpoints] == ["00000002"]
    assert train(corpus, tmp_path).cost["resumed"]
    assert outcome(tmp_path) == straight
    assert not list((tmp_path / "unfinished").iterdir())


@pytest.mark.parametrize(("every", "limit"), [("null", "SECONDS_BETWEEN"), ("1000", "MAX_SECONDS_BETWEEN")])
def test_checkpoints_are_saved_by_the_clock_where_a_number_of_steps_takes_long(
    every: str, limit: str, corpus: Path, tmp_path: Path, straight: tuple[Any, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*words(corpus, tmp_path), f"recipe.save_every={every}"]
    monkeypatch.setattr(resume, limit, 0.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="is of step 4"):
        stop_in(patch, 5)
        train_command.train(compose(overrides), overrides)
    monkeypatch.setattr(resume, limit, 3600.0)
    assert train_command.train(compose(overrides), overrides).cost["resumed"]
    assert outcome(tmp_path) == straight


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_point_that_would_run_code_is_passed_over(corpus: Path, tmp_path: Path, straight: tuple[Any, bytes]) -> None:
    checkpoints = stopped_training(corpus, tmp_path)
    marker = tmp_path / "ran"
    hostile = tmp_path / "hostile"
    torch.save({"infini": Hostile(marker)}, hostile)
    for path in checkpoints:
        hostile.rename(checkpoints[-1].with_name(f"step-00000007-{resume.sha256_of(hostile)}.ckpt"))
        hostile.write_bytes(pickle.dumps({"infini": Hostile(marker)}))
        path.unlink()
    assert not train(corpus, tmp_path).cost["resumed"]
    assert not marker.exists()
    assert outcome(tmp_path) == straight


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_no_space_left_keeps_the_point_before(
    corpus: Path, tmp_path: Path, straight: tuple[Any, bytes], where: str
) -> None:
    real: dict[str, Callable[..., Any]] = {"fsync": os.fsync, "replace": os.replace}
    full = OSError(28, "No space left on device")

    def failing(*arguments: Any) -> Any:
        if "step-00000006" in str(arguments[0]) or isinstance(arguments[0], int):
            raise full
        return real[where](*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space left"):
        stop_in(patch, STEPS)
        save = UnfinishedRun.save

        def saving(self: UnfinishedRun, step: int, write: Callable[[str], None]) -> Path:
            if step < 6:
                return save(self, step, write)
            if where != "write":
                patch.setattr(os, where, failing)
                return save(self, step, write)

            def half(path: str) -> None:
                write(path)
                truncate(Path(path))
                raise full

            return save(self, step, half)

        patch.setattr(UnfinishedRun, "save", saving)
        train(corpus, tmp_path)
    names = sorted(path.name[:13] for path in tmp_path.glob("unfinished/*/*") if path.name.startswith(("step", ".")))
    assert names == ["step-00000002", "step-00000004"]
    assert train(corpus, tmp_path).cost["resumed"]
    assert outcome(tmp_path) == straight


FULL = OSError(28, "No space left on device", "some/file")


def fail_at(patch: pytest.MonkeyPatch, call: str, what: str) -> None:
    """The disk is full when a file whose name holds `what` is flushed or renamed, or when weights are written."""
    import safetensors.torch

    if call == "write":

        def save_half(model: torch.nn.Module, path: str) -> None:
            Path(path).write_bytes(b"half")
            raise safetensors.SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

        patch.setattr(safetensors.torch, "save_model", save_half)
        return
    real: Callable[..., Any] = getattr(os, call)

    def failing(first: Any, *rest: Any) -> Any:
        name = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if what in name:
            raise FULL
        return real(first, *rest)

    patch.setattr(os, call, failing)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files are read from /proc")
@pytest.mark.parametrize(
    ("call", "what"),
    one_in(3, [("write", "model.safetensors"), *product(("fsync", "replace"), ("model.s", "config.", "runs/"))]),
)
def test_no_space_left_at_the_end_is_one_line_and_nothing_is_lost(
    corpus: Path,
    tmp_path: Path,
    straight: tuple[Any, bytes],
    capfd: pytest.CaptureFixture[str],
    call: str,
    what: str,
) -> None:
    command = ["train", *words(corpus, tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, call, what)
        assert cli.main(command) == cli.USAGE_ERROR
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("infini: ")]
    assert "No space left on device" in line
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".partial", ".tmp"))]
    assert records.load_records(tmp_path) == []
    assert cli.main(command) == 0
    assert outcome(tmp_path) == straight
    assert not list((tmp_path / "unfinished").iterdir())


@pytest.mark.slow
def test_no_room_for_a_point_is_one_line(corpus: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    here = Path(__file__).parents[1] / "support"
    done = subprocess.run(
        [sys.executable, "-m", "infini", "train", *words(corpus, tmp_path)],
        cwd=here.parent,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("infini: error: ") and "too large" in line]
    assert not list(tmp_path.rglob("*.ckpt")) and not list(tmp_path.rglob("*.partial"))


def signalled_in(patch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """This process gets the signal in this step of a training."""
    real = LanguageModelModule.training_step

    def signalled(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step + 1 == step:
            signal.raise_signal(number)
        return real(self, batch, index)

    patch.setattr(LanguageModelModule, "training_step", signalled)


@pytest.mark.parametrize(
    ("number", "step"), [(signal.SIGTERM, 1), (signal.SIGTERM, 5), (signal.SIGINT, 3), (signal.SIGUSR1, 5)]
)
def test_a_signal_stops_a_training_after_the_step_with_a_checkpoint(
    number: signal.Signals,
    step: int,
    corpus: Path,
    tmp_path: Path,
    straight: tuple[Any, bytes],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpoints are due every two steps."""
    # A shell starts what runs in the background with Ctrl-C ignored.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = [signal.getsignal(each) for each in signal.Signals]
    try:
        with monkeypatch.context() as patch:
            signalled_in(patch, step, number)
            assert cli.main(["train", *words(corpus, tmp_path)]) == cli.INTERRUPTED
        assert [signal.getsignal(each) for each in signal.Signals] == handlers
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert f"stopped after step {step}. The last good checkpoint is of step {step}: the" in capfd.readouterr().err
    assert train(corpus, tmp_path).cost["resumed"]
    assert outcome(tmp_path) == straight


def test_a_second_signal_stops_a_save_without_damage(
    corpus: Path,
    tmp_path: Path,
    straight: tuple[Any, bytes],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save = UnfinishedRun.save

    def saving(self: UnfinishedRun, step: int, write: Callable[[str], None]) -> Path:
        def half(path: str) -> None:
            write(path)
            truncate(Path(path))
            signal.raise_signal(signal.SIGTERM)

        return save(self, step, half if step == 5 else write)

    with monkeypatch.context() as patch:
        signalled_in(patch, 5, signal.SIGTERM)
        patch.setattr(UnfinishedRun, "save", saving)
        patch.setattr(resume, "SECONDS_OF_ONE_STOP", -1.0)
        assert cli.main(["train", *words(corpus, tmp_path)]) == cli.INTERRUPTED
    assert "The last good checkpoint is of step 4" in capfd.readouterr().err
    assert not list(tmp_path.glob("unfinished/*/.*.partial"))
    assert train(corpus, tmp_path).cost["resumed"]
    assert outcome(tmp_path) == straight


def test_every_random_number_is_the_one_it_would_have_been(corpus: Path, tmp_path: Path) -> None:
    drawn: dict[str, list[Any]] = {}
    real = LanguageModelModule.training_step

    def drawing(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        numbers = (self.global_step, random.random(), float(np.random.rand()), float(torch.rand(())))
        drawn.setdefault(name, []).append(numbers)
        return real(self, batch, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModelModule, "training_step", drawing)
        name = "straight"
        train(corpus, tmp_path / "straight")
        name = "first"
        stopped_training(corpus, tmp_path / "stopped", step=6)
        name = "second"
        train(corpus, tmp_path / "stopped")
    assert len(drawn["straight"]) == STEPS
    assert drawn["first"] + drawn["second"][1:] == drawn["straight"]
    assert drawn["second"] == drawn["straight"][4:]


def test_random_states_are_put_back() -> None:
    states = random_states(torch.device("cpu"))
    first = random.random(), float(np.random.rand()), float(torch.rand(()))
    set_random_states(states, torch.device("cpu"))
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == first


def test_the_random_state_of_a_gpu_is_put_back_on_a_gpu_of_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is that of the training's one GPU, on any machine, however many it has."""
    kept = {torch.device("cuda", 1): torch.tensor([1, 2, 3], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: kept[device])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: kept.update({device: state}))
    states = random_states(torch.device("cuda", 1))
    set_random_states(states, torch.device("cpu"))
    assert len(kept) == 1
    set_random_states(states, torch.device("cuda", 0))
    assert torch.equal(kept[torch.device("cuda", 0)], kept[torch.device("cuda", 1)])


def test_one_process_at_a_time(tmp_path: Path) -> None:
    held, other = UnfinishedRun(tmp_path / "run"), UnfinishedRun(tmp_path / "run")
    first, second = begun("a"), begun("b")
    held.claim(first)
    with pytest.raises(InputError, match="another process"):
        other.claim(second)
    held.release()
    other.claim(second)


def test_the_lock_is_held_until_all_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the removal takes the next process's own files."""
    run = UnfinishedRun(tmp_path / "run")
    run.claim(begun("a"))
    run.save(3, lambda path: torch.save({"infini": 1}, path))
    left: list[list[str]] = []
    release = UnfinishedRun.release

    def releasing(self: UnfinishedRun) -> None:
        left.append([path.name for path in self.folder.iterdir()])
        release(self)

    monkeypatch.setattr(UnfinishedRun, "release", releasing)
    run.clear()
    assert left == [[]] and not run.folder.exists()


def test_a_lock_on_a_removed_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process before removes its lock file between our opening and our locking of it."""
    path, real, times = tmp_path / "run" / "lock", fcntl.flock, []

    def locking(file: Any, how: int) -> None:
        if not times:
            path.unlink()
        times.append(how)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", locking)
    UnfinishedRun(tmp_path / "run").claim(begun("a"))
    assert len(times) == 2 and path.exists()


def test_a_run_that_resumes_on_another_processor_names_both_formats(tmp_path: Path) -> None:
    """parallel.precision=auto multiplies in bfloat16 where that is fast."""

    def claimed(bfloat16: bool) -> RunRecord:
        run, record = UnfinishedRun(tmp_path / "run"), begun("a")
        record.environment["bfloat16"] = bfloat16
        run.claim(record)
        run.release()
        return record

    claimed(False)
    run = UnfinishedRun(tmp_path / "run")
    run.save(3, lambda path: torch.save({"infini": 1}, path))
    assert "products" not in claimed(False).environment
    mixed = [claimed(bfloat16) for bfloat16 in (True, False)]
    assert [record.environment["products"] for record in mixed] == [["float32", "bfloat16"]] * 2
    with pytest.raises(
        InputError, match="cannot be published: its matrix products are partly in float32, partly in bfloat16"
    ):
        check_publishable(mixed[0], tmp_path, {})


def test_a_training_names_the_machines_that_it_was_on(
    corpus: Path, tmp_path: Path, straight: tuple[Any, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine alone is in `hardware`."""

    def on(cpu: str) -> None:
        monkeypatch.setattr(records, "_hardware", lambda: {"cpu": cpu, "accelerator": None})

    on("one")
    stopped_training(corpus, tmp_path / "alone")
    assert "machines" not in train(corpus, tmp_path / "alone").environment
    stopped_training(corpus, tmp_path / "several", step=4)
    on("other")
    stopped_training(corpus, tmp_path / "several")
    on("one")
    record = train(corpus, tmp_path / "several")
    assert record.environment["machines"] == ["one", "other"]
    assert records.load_records(tmp_path / "several") == [record]
    assert outcome(tmp_path / "several") == straight


def test_a_run_on_other_threads_of_a_machine_names_both(tmp_path: Path) -> None:
    def claimed(threads: int) -> RunRecord:
        run, record = UnfinishedRun(tmp_path / "run"), begun("a")
        record.environment |= {"hardware": {"cpu": "one", "accelerator": None}, "threads": threads}
        run.claim(record)
        run.save(threads, lambda path: torch.save({"infini": 1}, path))
        run.release()
        return record

    assert "thread_counts" not in claimed(2).environment
    assert claimed(4).environment["thread_counts"] == [2, 4] and "machines" not in claimed(4).environment


def test_a_run_keeps_its_id_from_its_first_point_on(tmp_path: Path) -> None:
    def claimed(record: RunRecord) -> tuple[str, bool]:
        run = UnfinishedRun(tmp_path / "run")
        try:
            return record.run_id, run.claim(record)
        finally:
            run.release()

    claimed(begun("a"))
    second = begun("b")
    assert claimed(second) == ("b", False) and second.run_id == "b"
    run = UnfinishedRun(tmp_path / "run")
    run.save(3, lambda path: torch.save({"infini": 1}, path))
    third = begun("c")
    assert claimed(third)[1] is False and third.run_id == "b"
    # It is the same run at another commit, but no single commit repeats it.
    fourth = begun("d", revision="f" * 40)
    assert claimed(fourth)[1] is True and fourth.environment["git_revisions"] == ["e" * 40, "f" * 40]
    # This stays so if the run goes on at the first commit again.
    assert claimed(begun("e"))[1] is True


def begun(run_id: str, revision: str = "e" * 40) -> RunRecord:
    return RunRecord(
        run_id=run_id,
        verb="train",
        task="pg19",
        model="local",
        scale="laptop",
        seed=1,
        parent=None,
        command="infini train",
        overrides=[],
        config={},
        config_hash="",
        started=run_id,
        environment={"git_revision": revision, "git_dirty": False},
    )
