"""Sweeps whose jobs run at once, each in a process of its own, by the launchers of the extra `cluster`."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import in_jobs
import pytest
import yaml
from command_runner import read_by
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from tiny_runs import TINY, outcome
from tiny_runs import words as of_training

from infini import records
from infini.cli import main as cli
from infini.cli import sweep
from infini.config.schema import key_of
from infini.evaluation import perplexity

LAUNCHERS = {
    "submitit_local": ["hydra/launcher=submitit_local"],
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "cluster.md"
ON_SLURM = [
    line
    for line in re.findall(r"\binfini (\w+ -m [^`\n]+)", PAGE.read_text(encoding="utf-8"))
    if "hydra/launcher=submitit_slurm" in line
]
"""Commands for Slurm, as the page shows them."""
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks up processes in /proc")
IN_SCRIPT = {"partition": "partition", "gpus_per_node": "gpus-per-node", "timeout_min": "time"}
"""Keys of the launcher and what sbatch calls them."""


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_jobs_train_at_once_and_one_that_fails_is_named(
    launcher: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    words = [
        *TINY,
        "logger=none",
        "parallel.accumulate=2",
        f"task.data_dir={corpus}",
        f"results_dir={tmp_path / 'results'}",
    ]
    line = ["train", "-m", *words, "recipe.batch_size=2,3", *LAUNCHERS[launcher]]
    assert cli.main(line) == cli.USAGE_ERROR
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("infini: error: 1 of 2 jobs failed; the first, ")
    assert "recipe.batch_size=3: must be a multiple of 2: devices, 1, x parallel.accumulate=2" in said
    (run,) = records.load_records(tmp_path / "results")
    assert (run.verb, run.config["recipe"]["batch_size"]) == ("train", 2)
    # The job that was done is skipped.
    assert cli.main(line) == cli.USAGE_ERROR
    assert [found.run_id for found in records.load_records(tmp_path / "results")] == [run.run_id]


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_of_a_launcher_share_the_runs_of_a_table(
    launcher: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    settings = [*TINY, "logger=none", f"task.data_dir={corpus}", f"results_dir={tmp_path / 'results'}"]
    rows = ["report=table2_lm", "task=pg19", "model=local,infini_linear", "seed=1,2"]
    words = [*read_by(["reproduce", *rows], settings), *rows, "workers=3"]
    assert cli.main(["reproduce", "-m", *words, *LAUNCHERS[launcher]]) == 0, capfd.readouterr().err
    made = sorted((run.verb, run.model, run.seed) for run in records.load_records(tmp_path / "results"))
    assert made == [
        (verb, model, seed) for verb in ("eval", "train") for model in ("infini_linear", "local") for seed in (1, 2)
    ]
    assert not list((tmp_path / "results" / "unfinished").glob("*"))


@pytest.fixture
def in_jobs_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a launcher starts find the module `in_jobs`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(in_jobs.__file__).parent), prepend=os.pathsep)


TWO_RANKS = ("parallel=ddp", "parallel.devices=2")
AS_SLURM = {3: signal.SIGTERM, 5: signal.SIGUSR2}
"""Signals to a job that makes room for another: step to signal. submitit passes the first over."""


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere", "in_jobs_found")
@pytest.mark.parametrize(
    ("more", "signals", "ranks"),
    [
        ((), {5: signal.SIGUSR2}, "0"),
        (TWO_RANKS, {5: signal.SIGUSR2}, "0"),
        pytest.param(TWO_RANKS, AS_SLURM, "all", marks=needs_proc),
    ],
    ids=["one device", "two devices", "two devices, all signalled"],
)
def test_a_job_of_submitit_that_is_preempted_is_queued_again_and_trains_on(
    more: tuple[str, ...],
    signals: dict[int, signal.Signals],
    ranks: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    assert cli.main(["train", *of_training(corpus, tmp_path / "straight"), *more]) == 0
    monkeypatch.setattr(sweep, "_job", partial(in_jobs.signalled, signals, ranks))
    line = ["train", "-m", *of_training(corpus, tmp_path / "results"), *more, *LAUNCHERS["submitit_local"]]
    assert cli.main(line) == 0, capfd.readouterr().err
    (said,) = (path.read_text(encoding="utf-8") for path in tmp_path.rglob("*_0_log.err"))
    (log,) = (path.read_text(encoding="utf-8") for path in tmp_path.rglob("*_0_log.out"))
    assert said.count("Caught signal SIGUSR2") == log.count("Requeued job") == 1, said
    assert said.count("Bypassing signal SIGTERM") == list(signals.values()).count(signal.SIGTERM)
    # It would be step 4 without the step in which the signal came.
    assert said.count("resuming from step") == said.count("resuming from step 5 of 7") == 1, said
    assert outcome(tmp_path / "results") == outcome(tmp_path / "straight")
    (run,) = records.load_records(tmp_path / "results")
    assert run.cost["resumed"] and not list((tmp_path / "results" / "unfinished").glob("*"))


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere", "in_jobs_found")
def test_a_process_of_a_table_that_is_preempted_is_queued_again_and_fills_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    rows = ["report=table2_lm", "task=pg19", "model=local", "seed=1"]

    def words(results: str) -> list[str]:
        settings = of_training(corpus, tmp_path / results)
        return [*read_by(["reproduce", *rows], settings), *rows]

    assert cli.main(["reproduce", *words("straight")]) == 0
    monkeypatch.setattr(sweep, "_worker", partial(in_jobs.signalled_worker, {5: signal.SIGUSR2}))
    line = ["reproduce", "-m", *words("results"), "workers=1", *LAUNCHERS["submitit_local"]]
    assert cli.main(line) == 0, capfd.readouterr().err
    (said,) = (path.read_text(encoding="utf-8") for path in tmp_path.rglob("*_0_log.err"))
    assert said.count("Caught signal SIGUSR2") == said.count("resuming from step 5 of 7") == 1, said
    straight, made = (
        {run.verb: run for run in records.load_records(tmp_path / name)} for name in ("straight", "results")
    )
    assert made["train"].cost["resumed"] and made["train"].series == straight["train"].series
    assert made["eval"].results == straight["eval"].results
    assert not list((tmp_path / "results" / "unfinished").glob("*"))


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere", "in_jobs_found")
def test_an_evaluation_that_is_preempted_resumes_after_its_last_answer(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.setattr(perplexity, "DOCS_PER_BATCH", 1)
    results, settings = tmp_path / "results", of_training(corpus, tmp_path / "results")
    words = ["eval", *read_by(["eval"], settings)]
    assert cli.main(["train", *settings]) == cli.main(words) == 0
    monkeypatch.setattr(sweep, "_job", in_jobs.preempted_after_two_answers)
    assert cli.main(["eval", "-m", *words[1:], *LAUNCHERS["submitit_local"]]) == 0, capfd.readouterr().err
    (log,) = (path.read_text(encoding="utf-8") for path in tmp_path.rglob("*_0_log.out"))
    assert log.count("Requeued job") == 1
    measured = (results / "measured").read_text(encoding="utf-8").splitlines()
    assert len(measured) == len(set(measured)) > 2
    straight, resumed = (run for run in records.load_records(results) if run.verb == "eval")
    assert (straight.cost["resumed"], resumed.cost["resumed"]) == (False, True)
    assert (resumed.results, resumed.documents) == (straight.results, straight.documents)


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere", "in_jobs_found")
def test_processes_of_submitit_take_over_the_runs_of_two_that_were_killed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    # Seconds that submitit waits for what a killed process might have left.
    monkeypatch.setattr("submitit.core.core.Job._results_timeout_s", 1)
    settings = [
        *TINY,
        "logger=none",
        "recipe.save_every=1",
        f"task.data_dir={corpus}",
        f"results_dir={tmp_path / 'results'}",
    ]
    rows = ["report=table2_lm", "task=pg19", "model=local,infini_linear", "seed=1,2", "workers=4"]
    line = ["reproduce", "-m", *read_by(["reproduce", *rows], settings), *rows, *LAUNCHERS["submitit_local"]]
    monkeypatch.setattr(sweep, "_worker", in_jobs.killed_if_third_or_fourth)
    # The launcher waits for its jobs in their order, and tells of the first that has failed.
    assert cli.main(line) == cli.USAGE_ERROR
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("infini: error: a process of reproduce -m has ended: Job ")
    assert said.endswith("has not produced any output (state: FINISHED); run the same command again to continue")
    runs = records.load_records(tmp_path / "results")
    assert sorted((run.verb, run.model, run.seed) for run in runs) == [
        (verb, model, seed) for verb in ("eval", "train") for model in ("infini_linear", "local") for seed in (1, 2)
    ]
    assert sum(run.cost["resumed"] for run in runs if run.verb == "train") == 2
    logs = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*_0_log.err")]
    killed = [text for text in logs if "trained " not in text]
    assert (len(logs), len(killed)) == (4, 2) and all("parameters on cpu" in text for text in killed), logs
    assert not list((tmp_path / "results" / "unfinished").glob("*"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-m"], "reproduce -m: name a launcher, for example hydra/launcher=joblib (see docs/how-to/cluster.md)"),
        (["workers=2"], "workers=2: several processes need -m and a launcher, for example hydra/launcher=joblib"),
        (["-m", "plan=true", *LAUNCHERS["joblib"]], "plan=true: starts nothing; leave out -m"),
        (["-m", "workers=0", *LAUNCHERS["joblib"]], "workers=0: must be at least 1"),
        (["-m", "seed=one", *LAUNCHERS["joblib"]], "seed='one': must be an integer, at least 0 and below 2**32"),
    ],
)
def test_what_cannot_be_shared_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "report=table2_lm", *words]) == cli.USAGE_ERROR
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"infini: error: {says}")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            "Job 7 (task: 0) with path 7_0_result.pkl\nhas not produced any output (state: FINISHED)\nError stream",
            "Job 7 (task: 0) with path 7_0_result.pkl has not produced any output (state: FINISHED)",
        ),
        ("Job not requeued because: timed-out too many times.", "Job not requeued because: timed-out too many times"),
        (
            "Job (task=0) failed during processing with trace:\n----------------------\n"
            'Traceback (most recent call last):\n  File "submission.py", line 55, in process_job\n    load()\n'
            "-------\nModuleNotFoundError: No module named 'in_jobs'\n\n----------------------\n"
            "You can check full logs with 'job.stderr(0)' and 'job.stdout(0)'or at paths:",
            "Job (task=0) failed during processing: ModuleNotFoundError: No module named 'in_jobs'",
        ),
        ("", "RuntimeError"),
    ],
)
def test_an_error_of_a_launcher_is_one_sentence(
    error: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def multirun(task: Any, overrides: Any) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(sweep, "_multirun", multirun)
    assert cli.main(["train", "-m", "task=passkey", "seed=1,2", *LAUNCHERS["submitit_local"]]) == cli.USAGE_ERROR
    said = capsys.readouterr().err.splitlines()[-1]
    again = "run the same command again for the remaining jobs"
    assert said == f"infini: error: hydra/launcher=submitit_local: {says}; {again}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_is_of_a_sweep(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    assert cli.main(["train", *LAUNCHERS[launcher]]) == cli.USAGE_ERROR
    assert capsys.readouterr().err.startswith(f"infini: error: hydra/launcher={launcher}: Hydra runs sweeps alone; add")


@pytest.fixture
def open_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra configures logging, which shuts down all handlers that there are. One of absl, which other tests of the
    process have imported, would close the stream that pytest reads."""
    monkeypatch.setattr(logging, "shutdown", lambda *handlers: None)


def slurm_settings(line: str) -> dict[str, Any]:
    """Settings of the launcher in a command: key to value."""
    words = [word.partition("=") for word in shlex.split(line)]
    return {key.removeprefix("hydra.launcher."): yaml.safe_load(value) for key, _, value in words if "launcher." in key}


def test_the_page_shows_a_sweep_and_a_table_on_slurm() -> None:
    assert sorted(line.split()[0] for line in ON_SLURM) == ["reproduce", "train"]
    assert all(slurm_settings(line)["partition"] == "gpu" for line in ON_SLURM)


def launcher_of(words: Sequence[str]) -> Any:
    """The configuration of the launcher that words of Hydra name."""
    with hydra.initialize_config_module("infini.conf", version_base="1.3", job_name="infini"):
        engine = GlobalHydra.instance().hydra
        assert engine is not None
        return engine.compose_config("config", list(words), RunMode.MULTIRUN).hydra.launcher


@pytest.mark.parametrize("line", ON_SLURM)
def test_words_for_slurm_are_keys_of_its_launcher(line: str) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = [word for word in shlex.split(line) if key_of(word).startswith("hydra")]
    made = launcher_of(words)
    assert made["_target_"].rpartition(".")[2] == "SlurmLauncher"
    settings = slurm_settings(line)
    assert {key: made[key] for key in settings} == settings


@pytest.mark.usefixtures("elsewhere", "open_streams")
def test_the_limits_of_jobs_of_submitit_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the configuration for Slurm; the local executor has defaults of its own, which it gives to its jobs."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    from submitit.core.utils import DelayedSubmission
    from submitit.local import local

    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    shown = [row for row in rows if len(row) == 3 and row[1].startswith("`hydra.launcher.")]
    on_slurm = {key: int(value) for _, text, _ in shown for key, value in re.findall(r"launcher\.(\w+)`\D*(\d+)", text)}
    here = [
        on_slurm[key] if text == "the same" else int(text.split()[0])
        for key, (*_, text) in zip(on_slurm, shown, strict=True)
    ]
    made = launcher_of(["hydra/launcher=submitit_slurm"])
    assert on_slurm == {key: made[key] for key in ("timeout_min", "signal_delay_s", "max_num_timeout")}
    given: dict[str, Any] = {}

    def started(**options: Any) -> None:
        given.update(options)
        raise RuntimeError("refused")

    monkeypatch.setattr(local, "start_controller", started)
    monkeypatch.setattr(
        DelayedSubmission, "set_timeout", lambda self, minutes, times: given.update(max_num_timeout=times)
    )
    assert cli.main(["train", "-m", "task=passkey", "seed=1,2", *LAUNCHERS["submitit_local"]]) == cli.USAGE_ERROR
    assert here == [given[key] for key in on_slurm]


def test_torchrun_passes_on_the_signals_of_the_page() -> None:
    """The one before the end of the job's time, and those for which the page names an option."""
    run = pytest.importorskip("torch.distributed.run")
    text = PAGE.read_text(encoding="utf-8")
    in_script, with_option = re.findall(r"^(?:srun )?torchrun (--.*?)(?: &)?$", text, re.MULTILINE)
    handled = [
        set(run.get_args_parser().parse_args(shlex.split(line)).signals_to_handle.split(","))
        for line in (in_script, with_option)
    ]
    (seconds,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    # Slurm's signal is for the script, which passes this one on.
    assert re.search(r"^ +kill -TERM ", text, re.MULTILINE) and "SIGTERM" in handled[0]
    # After the signal torchrun waits for its processes that long.
    assert int(seconds) > 30
    assert handled[1] - handled[0] == {"SIGUSR1", "SIGUSR2"}


@pytest.mark.usefixtures("elsewhere", "open_streams")
@pytest.mark.parametrize("line", [*ON_SLURM, *(f"{line} scale=gpu" for line in ON_SLURM if line.startswith("train"))])
def test_words_for_slurm_are_in_the_script_of_its_jobs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command runs as it stands, up to an sbatch that keeps the script and refuses it. The machine that sends the
    jobs may lack the GPU that they get."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    programs, script = tmp_path / "programs", tmp_path / "script"
    programs.mkdir()
    refuses = f'cp "$1" {shlex.quote(str(script))}; echo "sbatch: error: no such partition" >&2; exit 1'
    for name, does in (("srun", "exit 0"), ("sbatch", refuses)):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    assert cli.main(shlex.split(line)) == cli.USAGE_ERROR
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("infini: error: ") and "sbatch: error: no such partition; run the same command again" in said
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script.read_text(encoding="utf-8"), re.MULTILINE))
    # The launcher's own default is an hour.
    wanted = {"timeout_min": 60, **slurm_settings(line)}
    assert [asked[name] for name in IN_SCRIPT.values()] == [str(wanted[key]) for key in IN_SCRIPT]


@pytest.mark.usefixtures("elsewhere", "open_streams")
def test_without_slurm_a_sweep_on_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["train", "-m", "task=passkey", "seed=1,2", "hydra/launcher=submitit_slurm"]) == cli.USAGE_ERROR
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith('infini: error: hydra/launcher=submitit_slurm: Could not detect "srun"')
    assert said.endswith("; run the same command again for the remaining jobs")
