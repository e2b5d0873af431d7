"""A training is what its configuration says: environment variables and files that lie around change nothing."""

from __future__ import annotations

import csv
import importlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tiny_runs import outcome, words

from infini import records, runs
from infini.cli import main as cli
from infini.config.compose import compose
from infini.errors import InputError
from infini.runs import train as train_command
from infini.training.module import LanguageModelModule
from infini.training.trainer import make_trainer

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "node1",
}
LAUNCHERS = {
    "slurm, one of two tasks": SLURM | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
    "torchrun": {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "203.0.113.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "a",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    },
    "lsf": {
        "LSB_JOBID": "1",
        "LSB_DJOB_RANKFILE": "/nowhere",
        "JSM_NAMESPACE_RANK": "1",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_SIZE": "2",
    },
    "seeds": {"PL_GLOBAL_SEED": "99", "PL_SEED_WORKERS": "1"},
}
TRAINER = {
    "PL_TRAINER_FAST_DEV_RUN": "1",
    "PL_TRAINER_ACCUMULATE_GRAD_BATCHES": "2",
    "PL_TRAINER_MAX_TIME": "00:00:00:01",
    "PL_TRAINER_LIMIT_TRAIN_BATCHES": "1",
    "PL_TRAINER_OVERFIT_BATCHES": "1",
    "PL_TRAINER_GRADIENT_CLIP_ALGORITHM": "value",
    "PL_TRAINER_DETECT_ANOMALY": "True",
    "PL_TRAINER_MAX_STEPS": "1",
    "PL_TRAINER_PRECISION": "bf16-true",
}


@pytest.fixture(autouse=True)
def ranks_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes]:
    results = tmp_path_factory.mktemp("straight")
    assert cli.main(["train", *words(corpus, results)]) == 0
    return outcome(results)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def variables_of(environment: Any) -> dict[str, str]:
    """The variables without those that Lightning's seed_everything and pytest set for this process."""
    return {key: value for key, value in environment.items() if not key.startswith(("PL_", "PYTEST_"))}


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.parametrize("variables", LAUNCHERS.values(), ids=LAUNCHERS)
def test_no_launchers_variable_changes_a_training(
    variables: dict[str, str],
    strategy: str,
    corpus: Path,
    tmp_path: Path,
    straight: tuple[Any, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_all(monkeypatch, variables)
    # An import of Lightning with such a rank in the environment leaves this.
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    before = variables_of(os.environ)
    try:
        assert cli.main(["train", *words(corpus, tmp_path), f"parallel.strategy={strategy}"]) == 0
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert outcome(tmp_path) == straight
    assert variables_of(os.environ) == before


def test_the_curves_of_a_process_of_another_rank_are_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning's loggers write nothing where this is not 0, and RANK or SLURM_PROCID sets it when it is imported.
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert cli.main(["train", *words(corpus, tmp_path), "recipe.steps=10", "logger=csv"]) == 0
    (curves,) = tmp_path.glob("logs/*/metrics.csv")
    with open(curves, encoding="utf-8") as file:
        assert [row["step"] for row in csv.DictReader(file) if row["loss"]] == ["9"]


def test_no_variable_of_lightning_changes_a_training(
    corpus: Path,
    tmp_path: Path,
    straight: tuple[Any, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    set_all(monkeypatch, TRAINER)
    assert cli.main(["train", *words(corpus, tmp_path)]) == 0
    assert outcome(tmp_path) == straight
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "PL_TRAINER_" in line]
    assert all(name in line for name in TRAINER) and line.endswith(
        "ignored; the configuration alone decides a training"
    )


def test_every_argument_of_a_trainer_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning looks for those that are not in the environment."""
    arguments = set(inspect.signature(lightning.Trainer).parameters)
    given: dict[str, Any] = {}
    monkeypatch.setattr(lightning.Trainer, "__init__", lambda self, **options: given.update(options))
    make_trainer(accelerator="cpu", max_steps=3, logger=False)
    assert set(given) == arguments
    assert (given["max_steps"], given["fast_dev_run"], given["limit_train_batches"]) == (3, False, None)


def test_a_checkpoint_that_lies_in_the_working_folder_is_not_taken_up(
    corpus: Path, tmp_path: Path, straight: tuple[Any, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's requeued jobs find theirs by name, hpc_ckpt_<number>.ckpt: it may be another training's."""
    other = tmp_path / "other"
    real = LanguageModelModule.training_step

    def stopping(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == 5:
            raise KeyboardInterrupt
        return real(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelModule, "training_step", stopping)
        assert cli.main(["train", *words(corpus, other), "seed=2"]) == cli.INTERRUPTED
    (point,) = other.glob("unfinished/*/step-00000004-*.ckpt")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shutil.copy(point, "hpc_ckpt_1.ckpt")
    set_all(monkeypatch, SLURM)
    assert cli.main(["train", *words(corpus, tmp_path / "results")]) == 0
    assert outcome(tmp_path / "results") == straight
    (record,) = records.load_records(tmp_path / "results")
    assert not record.cost["resumed"]
    assert [path.name for path in Path.cwd().iterdir()] == ["hpc_ckpt_1.ckpt"]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signal")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
@pytest.mark.parametrize("variables", [{}, SLURM], ids=["a shell", "a Slurm job"])
def test_a_signal_of_slurm_stops_a_training_like_ctrl_c(
    variables: dict[str, str],
    number: signal.Signals,
    corpus: Path,
    tmp_path: Path,
    straight: tuple[Any, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing is saved in the working folder, no job is queued: the run resumes from its own checkpoint."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    requeue = tmp_path / "bin" / "scontrol"
    requeue.write_text(f"#!/bin/sh\ntouch '{tmp_path}/requeued'\n")
    requeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path / "here")
    set_all(monkeypatch, variables)
    results = tmp_path / "results"
    real = LanguageModelModule.training_step

    def told(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == 5:
            os.kill(os.getpid(), number)
        return real(self, batch, index)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelModule, "training_step", told)
        assert cli.main(["train", *words(corpus, results)]) == cli.INTERRUPTED
    assert signal.getsignal(number) is before
    assert "The last good checkpoint is of step 6: the same command resumes from it" in capfd.readouterr().err
    assert not list((tmp_path / "here").iterdir()) and not (tmp_path / "requeued").exists()
    assert cli.main(["train", *words(corpus, results)]) == 0
    assert outcome(results) == straight
    assert records.load_records(results)[0].cost["resumed"]


@pytest.fixture
def handlers_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def preempted(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Signals as Slurm sends them to a job that makes room for others: SIGTERM, which submitit ignores, and SIGUSR2."""
    load, step, save = (
        train_command.load_data_module,
        LanguageModelModule.training_step,
        lightning.Trainer.save_checkpoint,
    )

    def loaded(cfg: Any) -> Any:
        if moment == "data is prepared":
            signal.raise_signal(signal.SIGUSR2)
        return load(cfg)

    def stepped(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step + 1 == 3:
            signal.raise_signal(signal.SIGTERM)
        if self.global_step + 1 == 5:
            for _ in range({"in a step": 1, "twice": 2}.get(moment, 0)):
                signal.raise_signal(signal.SIGUSR2)
        return step(self, batch, index)

    def saved(self: lightning.Trainer, path: Any, *more: Any, **options: Any) -> None:
        save(self, path, *more, **options)
        # The file does not have its name yet.
        if self.global_step == 4 and moment == "a checkpoint is written":
            signal.raise_signal(signal.SIGUSR2)

    monkeypatch.setattr(train_command, "load_data_module", loaded)
    monkeypatch.setattr(LanguageModelModule, "training_step", stepped)
    monkeypatch.setattr(lightning.Trainer, "save_checkpoint", saved)


@pytest.mark.usefixtures("handlers_put_back")
@pytest.mark.parametrize(
    ("moment", "again"),
    [
        ("in a step", True),
        ("in a step", False),
        ("twice", True),
        ("data is prepared", True),
        ("a checkpoint is written", True),
    ],
    ids=["queued again", "timed out too often", "twice", "data is prepared", "a checkpoint is written"],
)
def test_submitit_asks_slurm_for_another_start_once_the_step_is_saved(
    moment: str,
    again: bool,
    corpus: Path,
    tmp_path: Path,
    straight: tuple[Any, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm kills a job when it queues it again. submitit's own handlers of signals ask an scontrol that keeps what it
    is asked, and which checkpoint there is."""
    launchers = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    from submitit.core.utils import DelayedSubmission, JobPaths, UncompletedJobError
    from submitit.slurm.slurm import SlurmJobEnvironment

    results, programs, asked = tmp_path / "results", tmp_path / "programs", tmp_path / "asked"
    programs.mkdir()
    scontrol = programs / "scontrol"
    scontrol.write_text(f'#!/bin/sh\n{{ echo "$@"; cd "{results}/unfinished" && ls */*.ckpt; }} >> "{asked}"; true\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    set_all(monkeypatch, SLURM | {"SUBMITIT_EXECUTOR": "slurm"})
    submitted = DelayedSubmission(launchers.SlurmLauncher())
    # Minutes, and how often they may end. A job of less than ten minutes counts as one that has no time left.
    submitted.set_timeout(5, int(again))
    SlurmJobEnvironment()._handle_signals(JobPaths(tmp_path, "7"), submitted)
    handler = signal.getsignal(signal.SIGUSR2)
    overrides = words(corpus, results)
    with monkeypatch.context() as patch:
        preempted(patch, moment)
        with pytest.raises((SystemExit, UncompletedJobError, KeyboardInterrupt)) as ended:
            train_command.train(compose(overrides), overrides)
    assert ended.type is (SystemExit if again else UncompletedJobError)
    assert signal.getsignal(signal.SIGUSR2) == handler
    started = moment != "data is prepared"
    assert bool(list(results.glob("unfinished/*/step-00000005-*.ckpt"))) is started
    if again:
        asks, *points = asked.read_text().splitlines()
        assert asks == "requeue 7" and not any("requeue" in point for point in points)
        assert (not started and not points) or "step-00000005-" in points[-1]
        assert (tmp_path / "7_submitted.pkl").exists()
    else:
        assert not asked.exists()
    assert train_command.train(compose(overrides), overrides).cost["resumed"] is started
    assert outcome(results) == straight


def test_a_handler_of_another_program_stays(corpus: Path, tmp_path: Path) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    try:
        with pytest.MonkeyPatch.context() as patch:
            real = LanguageModelModule.training_step

            def telling(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
                os.kill(os.getpid(), signal.SIGUSR1)
                return real(self, batch, index)

            patch.setattr(LanguageModelModule, "training_step", telling)
            assert cli.main(["train", *words(corpus, tmp_path)]) == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told


def test_a_training_that_ends_early_leaves_no_record(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = LanguageModelModule.training_step

    def ending(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == 4:
            self.trainer.should_stop = True
        return real(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelModule, "training_step", ending)
        assert cli.main(["train", *words(corpus, tmp_path)]) == cli.USAGE_ERROR
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("infini: error: recipe.steps=7: the training ended after 5 optimizer steps on 5 batches")
    assert not records.load_records(tmp_path) and not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_a_strategy_that_starts_processes_is_one_line(
    strategy: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The training would be another process's, and the record that of an untrained model."""
    assert cli.main(["train", *words(corpus, tmp_path), f"parallel.strategy={strategy}"]) == cli.USAGE_ERROR
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith(
        f"infini: error: parallel.strategy='{strategy}': not available here (it starts processes, and a training is "
        "one process"
    )


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", ""), ("SLURM_PROCID", "x"), ("JSM_NAMESPACE_RANK", "1.0")])
def test_a_rank_that_is_no_number_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as refused:
        importlib.reload(runs)
    assert str(refused.value) == f"{name}={value!r}: this environment variable must be a number, or unset"


def test_a_rank_that_is_no_number_is_one_line() -> None:
    """It is said before Lightning reads the variable, which it does when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "infini", "train", "task.data_dir=synthetic"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "RANK": "first"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == cli.USAGE_ERROR
    (line,) = done.stderr.splitlines()
    assert line == "infini: error: RANK='first': this environment variable must be a number, or unset"


@pytest.mark.parametrize("logger", ["wandb", pytest.param("tensorboard", marks=pytest.mark.slow)])
def test_no_loggers_variable_changes_a_training(
    logger: str, corpus: Path, tmp_path: Path, straight: tuple[Any, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(logger)
    monkeypatch.setenv("HOME", str(tmp_path))
    set_all(monkeypatch, {"WANDB_MODE": "offline", "WANDB_SWEEP_ID": "a", "WANDB_RUN_ID": "b", "WANDB_RESUME": "must"})
    monkeypatch.setenv("WANDB_SILENT", "true")
    results = tmp_path / "results"
    assert cli.main(["train", *words(corpus, results), f"logger={logger}"]) == 0
    assert outcome(results) == straight
