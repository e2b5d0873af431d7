"""Loggers of a training's curves."""

from __future__ import annotations

import builtins
import csv
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from spoiling import full_for
from tiny_runs import TINY, outcome, write_corpus
from wandb_files import config_of, history_of, run_of

from infini import records
from infini.cli import main as cli
from infini.config.schema import LoggerConfig, WandbConfig
from infini.errors import InputError
from infini.training import loggers, training_curves
from infini.training.module import LanguageModelModule
from infini.training.training_curves import gate_values

WANDB = WandbConfig("wandb", None, "infini", None, None, None, [])
LABELS = loggers.RunLabels("run-1", "train", "table2_lm", ("pg19",), {"seed": 1})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def train(corpus: Path, results: Path, *words: str) -> int:
    settings = [f"task.data_dir={corpus}", f"results_dir={results}", "recipe.steps=30", "recipe.save_every=10"]
    return cli.main(["train", *TINY, *settings, *words])


def test_curves_go_to_a_csv_file_by_default_and_every_sitting_keeps_its_own(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LanguageModelModule.training_step

    def stopping(self: LanguageModelModule, batch: Any, index: int) -> Any:
        if self.global_step == 25:
            raise KeyboardInterrupt
        return real(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelModule, "training_step", stopping)
        assert train(corpus, tmp_path) == cli.INTERRUPTED
    assert train(corpus, tmp_path) == 0
    (run,) = records.load_records(tmp_path)
    steps = []
    for folder in (run.run_id, f"{run.run_id}-2"):
        with open(tmp_path / "logs" / folder / "metrics.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        # The result of the validation at the end has a row of its own.
        validated = [row["validation_nll_per_token"] for row in rows if not row["loss"]]
        rows = [row for row in rows if row["loss"]]
        steps.append([int(row["step"]) for row in rows])
        known = dict(run.series["loss_curve"])
        assert all(float(row["loss"]) == pytest.approx(known[int(row["step"]) + 1], abs=1e-4) for row in rows)
    assert steps == [[9, 19], [29]]
    assert float(validated[0]) == run.metric("validation_nll_per_token")


def netrc(folder: Path, text: str) -> Path:
    path = folder / "netrc"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("variables", "login", "modes", "said"),
    [
        ({}, "", ["offline"], ""),
        ({"WANDB_API_KEY": "0" * 40}, "", ["online"], ""),
        ({}, "machine api.wandb.ai login user password key", ["online"], ""),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_MODE": "offline"}, "", ["offline"], ""),
        ({"WANDB_API_KEY": "bad"}, "", ["online", "offline"], "logger=wandb: cannot connect (no network); continues"),
    ],
    ids=["nobody", "a key", "a login", "told to", "no network"],
)
def test_wandb_asks_nothing_and_stops_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    variables: dict[str, str],
    login: str,
    modes: list[str],
    said: str,
) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(netrc(tmp_path, login)))
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked: list[str] = []

    def init(settings: Any, **options: Any) -> Any:
        asked.append(settings.mode)
        # It has a limit: otherwise it would wait for a lost network as long as that is lost.
        assert 0 < settings.finish_timeout <= 60
        assert options["id"] == "run-1" and options["project"] == "infini"
        if settings.mode == "online" and len(modes) > 1:
            assert settings.init_timeout <= 30
            raise wandb.errors.CommError("no network\nlong story")
        return real(settings=wandb.Settings(mode="disabled"))

    real = wandb.init
    monkeypatch.setattr(wandb, "init", init)
    loggers.make_logger(WANDB, tmp_path / "logs", LABELS)
    loggers.close_loggers()
    assert asked == modes
    assert said in capfd.readouterr().err


def test_a_mode_that_wandb_does_not_have_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(InputError, match="^WANDB_MODE='ofline': must be one of .*; did you mean 'offline'"):
        loggers.make_logger(WANDB, tmp_path / "logs", LABELS)


def test_a_setting_of_wandb_that_is_wrong_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    # wandb raises this where it reads WANDB_RUN_ID or the like.
    monkeypatch.setattr(wandb, "init", lambda **options: wandb.Settings(init_timeout="soon"))
    with pytest.raises(InputError, match="(?s)^logger=wandb: .*init_timeout"):
        loggers.make_logger(WANDB, tmp_path / "logs", LABELS)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WANDB_MODE", "bogus", "WANDB_MODE='bogus': must be one of online, offline, disabled, dryrun"),
        ("WANDB_INIT_TIMEOUT", "soon", "WANDB_INIT_TIMEOUT='soon': Weights & Biases does not take it (Input should be"),
        ("WANDB_BASE_URL", "nonsense", "WANDB_BASE_URL='nonsense': Weights & Biases does not take it (Input should be"),
    ],
)
def test_a_variable_of_wandb_that_is_wrong_is_said_before_any_work(
    name: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv(name, value)
    assert train(tmp_path / "no_books", tmp_path / "results", "logger=wandb") == cli.USAGE_ERROR
    assert f"infini: error: {said}" in capfd.readouterr().err


def test_a_package_that_is_missing_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(loggers.PACKAGES, "wandb", "no_such_package")
    assert train(tmp_path / "no_books", tmp_path / "results", "logger=wandb") == cli.USAGE_ERROR
    assert "logger=wandb: needs a package that is not installed; pip install no_such_package" in capfd.readouterr().err


@pytest.mark.usefixtures("offline_wandb")
def test_wandb_is_told_which_run_it_is_by_the_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Against wandb itself: a variable in its environment would break, redirect or resume a run."""
    given = {"WANDB_RUN_ID": "a/b", "WANDB_RESUME": "must", "WANDB_DIR": "/proc/x", "WANDB_PROJECT": "a/b"}
    given |= {"WANDB_NAME": "", "WANDB_CONFIG_PATHS": "/none", "WANDB_SWEEP_ID": "s", "WANDB_FORK_FROM": "other"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    loggers.check_logger("wandb")
    said = capfd.readouterr().err.splitlines()
    assert sorted(line.split()[1].partition("=")[0] for line in said) == sorted(given)
    assert "logger=wandb: WANDB_PROJECT=a/b is ignored; logger.project decides" in said
    made = loggers.make_logger(WANDB, tmp_path / "logs", LABELS)
    assert (made.experiment.id, made.experiment.name, made.experiment.project) == ("run-1", "run-1", "infini")
    loggers.close_loggers()
    assert [path.name[-5:] for path in (tmp_path / "logs").glob("wandb/offline-run-*")] == ["run-1"]
    assert all(os.environ[name] == value for name, value in given.items())


CURVES = (
    *("gradient_norm", "tokens_per_second", "peak_memory_gb", "learning_rate/matrices", "learning_rate/gates"),
    *("gate_mean/layer_1", "gate_share_below_0.1/layer_1", "gate_share_above_0.9/layer_1"),
)


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is logged in to Weights & Biases."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    # Set and taken away, so that what the logger sets is gone after the test.
    monkeypatch.setenv("WANDB_MODE", "")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def offline_runs(results: Path) -> list[Path]:
    return sorted((results / "logs").glob("wandb/offline-run-*"))


@pytest.mark.usefixtures("nobody")
def test_wandb_shows_what_a_training_is_and_its_curves(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same training without a logger has the same losses and weights to the last bit."""
    monkeypatch.setenv("WANDB_PROJECT", "elsewhere")
    assert train(corpus, tmp_path / "plain", "logger=none") == 0
    capfd.readouterr()
    named = ["logger.project=mine", "logger.entity=us", "logger.run_name=first", "logger.tags=[ours]"]
    words = ["logger=wandb", "logger.validate_every=10", *named]
    assert train(corpus, tmp_path / "drawn", *words) == 0
    assert outcome(tmp_path / "drawn") == outcome(tmp_path / "plain")
    said = capfd.readouterr().err.splitlines()
    assert "logger=wandb: WANDB_PROJECT=elsewhere is ignored; logger.project decides" in said
    assert "logger=wandb: offline (nobody is logged in), project mine, group table2_lm" in said
    (folder,) = offline_runs(tmp_path / "drawn")
    assert f"to send it: wandb sync {folder}" in said
    run = run_of(folder)
    assert (run.project, run.entity, run.run_group, run.display_name) == ("mine", "us", "table2_lm", "first")
    assert list(run.tags) == ["pg19", "infini_linear", "laptop", "seed 1", "ours"]
    (record,) = records.load_records(tmp_path / "drawn")
    config = config_of(folder)
    assert config["run_id"] == run.run_id == record.run_id
    assert config["recipe"] == record.config["recipe"] and config["report"]["name"] == "table2_lm"
    history = history_of(folder)
    points = {point["trainer/global_step"]: point for point in history if "loss" in point}
    assert list(points) == [9, 19, 29] and all(set(CURVES) <= set(point) for point in points.values())
    known = dict(record.series["loss_curve"])
    assert all(point["loss"] == pytest.approx(known[step + 1]) for step, point in points.items())
    # The rate falls from the end of the warm-up along a cosine to a tenth.
    assert points[29]["learning_rate/matrices"] == pytest.approx(record.config["optimizer"]["lr"] * 0.1)
    assert points[29]["gate_mean/layer_1"] == pytest.approx(sum(record.series["gates"][0]) / 2)
    name = "validation_nll_per_token"
    validated = [(point["trainer/global_step"], point[name]) for point in history if name in point]
    assert [step for step, _ in validated] == [9, 19, 29]
    assert validated[-1][1] == record.metric(name) < validated[0][1]


@pytest.mark.usefixtures("nobody")
def test_a_training_that_resumes_continues_its_run_in_wandb(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = LanguageModelModule.training_step

    def stopping(self: LanguageModelModule, batch: Any, index: int) -> Any:
        if self.global_step == 15:
            raise KeyboardInterrupt
        return real(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelModule, "training_step", stopping)
        assert train(corpus, tmp_path, "logger=wandb") == cli.INTERRUPTED
    assert train(corpus, tmp_path, "logger=wandb") == 0
    first, second = offline_runs(tmp_path)
    assert f"to send it: wandb sync {first} {second}" in capfd.readouterr().err.splitlines()
    assert run_of(first).run_id == run_of(second).run_id
    steps = [[p["trainer/global_step"] for p in history_of(folder) if "loss" in p] for folder in (first, second)]
    assert steps == [[9], [19, 29]]


def test_the_group_is_the_report_a_training_is_of(corpus: Path, tmp_path: Path) -> None:
    from infini.config.compose import compose
    from infini.runs.common import start_record

    def group(*words: str) -> str:
        cfg = compose([*words, f"results_dir={tmp_path}"])
        return loggers.labels_of(cfg, start_record("train", cfg, list(words))).group

    assert group("task=pg19") == group("task=arxiv_math") == "table2_lm"
    assert group("task=passkey") == "passkey"
    assert group("task=passkey", "report=table3_passkey") == "table3_passkey"
    # A model of books from which a row of another table starts.
    assert group("report=table3_passkey", "task=pg19") == "table3_passkey"
    assert group("experiment=rmt_sweep") == "rmt_sweep"


def test_gates_are_drawn_by_layer() -> None:
    values = gate_values([[0.05, 0.5, 0.95, 0.9], [0.1, 0.1, 0.1, 0.1]])
    assert values["gate_mean/layer_1"] == pytest.approx(0.6) and values["gate_mean/layer_2"] == pytest.approx(0.1)
    assert values["gate_share_below_0.1/layer_1"] == values["gate_share_above_0.9/layer_1"] == 0.25
    assert values["gate_share_below_0.1/layer_2"] == 0
    assert gate_values(None) == {}


def test_values_are_read_in_the_steps_that_are_logged(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read from a GPU waits for it."""
    read: list[int] = []
    real = training_curves.TrainingCurves._values

    def counting(self: Any, trainer: Any, module: Any) -> Any:
        read.append(trainer.global_step)
        return real(self, trainer, module)

    norms: list[int] = []
    total_norm = torch.nn.utils.get_total_norm
    monkeypatch.setattr(training_curves.TrainingCurves, "_values", counting)
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda given: norms.append(1) or total_norm(given))
    assert train(corpus, tmp_path) == 0
    assert read == [10, 20, 30] and len(norms) == 3


@pytest.mark.usefixtures("nobody")
def test_wandb_goes_offline_where_nobody_is_logged_in(corpus: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        assert train(corpus, tmp_path / "results", "logger=wandb", f"seed={seed}") == 0
    # A run each, though both are trained in one process.
    kept = [path.name for path in (tmp_path / "results" / "logs").glob("wandb/offline-run-*")]
    ids = [run.run_id for run in records.load_records(tmp_path / "results")]
    assert len(kept) == 2 and all(any(name.endswith(run_id) for name in kept) for run_id in ids)


def test_wandb_goes_offline_where_nothing_answers(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Against wandb itself: what the first attempt leaves must not be in the way of the second."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    # A port at which nobody listens.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setitem(loggers.WANDB_SECONDS, "init_timeout", 1.0)
    assert train(corpus, tmp_path / "results", "logger=wandb") == 0
    assert capfd.readouterr().err.count("logger=wandb: cannot connect") == 1
    (kept,) = (tmp_path / "results" / "logs").glob("wandb/offline-run-*")
    (run,) = records.load_records(tmp_path / "results")
    assert kept.name.endswith(run.run_id)


def test_tensorboard_is_given_the_curve(corpus: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert train(corpus, tmp_path, "logger=tensorboard") == 0
    (run,) = records.load_records(tmp_path)
    read = accumulator.EventAccumulator(str(tmp_path / "logs" / run.run_id))
    read.Reload()
    known = dict(run.series["loss_curve"])
    points = read.Scalars("loss")
    assert [point.step for point in points] == [9, 19, 29]
    assert all(point.value == pytest.approx(known[point.step + 1], abs=1e-4) for point in points)
    for name in CURVES:
        assert [point.step for point in read.Scalars(name)] == [9, 19, 29], name
    (validated,) = read.Scalars("validation_nll_per_token")
    assert validated.value == pytest.approx(run.metric("validation_nll_per_token"))
    hparams = (tmp_path / "logs" / run.run_id / "hparams.yaml").read_text(encoding="utf-8")
    assert "group: table2_lm" in hparams and "tags: pg19, infini_linear, laptop, seed 1" in hparams


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.loggers import tensorboard

    # Lightning asks these before it makes a logger.
    monkeypatch.setattr(tensorboard, "_TENSORBOARD_AVAILABLE", False)
    monkeypatch.setattr(tensorboard, "_TENSORBOARDX_AVAILABLE", False)
    with pytest.raises(InputError, match="^logger=tensorboard: needs a package .* pip install tensorboard"):
        loggers.make_logger(LoggerConfig("tensorboard", None), tmp_path, LABELS)
    assert loggers.make_logger(LoggerConfig("none", None), tmp_path, LABELS) is False


def test_a_disk_that_is_full_for_the_curves_is_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_for("metrics.csv", monkeypatch)
    assert train(corpus, tmp_path, "logger=csv") == cli.USAGE_ERROR
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"infini: error: {tmp_path}/logs/") and "metrics.csv: No space left on device" in said


def test_a_disk_that_is_full_for_tensorboard_is_one_line(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    # Put back after the test: the logger sets it.
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    full_for("events.out", monkeypatch)
    # TensorBoard takes it from there.
    monkeypatch.setattr(io, "open", builtins.open)
    assert train(corpus, tmp_path, "logger=tensorboard") == cli.USAGE_ERROR
    said = capfd.readouterr().err
    last = said.splitlines()[-1]
    assert "Traceback" not in said and last.startswith(f"infini: error: {tmp_path}/logs/")
    assert "No space left on device" in last


def test_disk_errors_of_other_threads_are_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class _AsyncWriterThread(threading.Thread):
        """Named as TensorBoard's, whose error the training meets too."""

    def fail() -> None:
        raise OSError("no disk")

    monkeypatch.setattr(threading, "excepthook", loggers._report_unless_disk_error)
    for kind, said in ((_AsyncWriterThread, False), (threading.Thread, True)):
        thread = kind(target=fail)
        thread.start()
        thread.join()
        assert ("no disk" in capfd.readouterr().err) == said
