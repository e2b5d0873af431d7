"""Loggers of training curves: a CSV file, Weights & Biases, TensorBoard, or none."""

from __future__ import annotations

import importlib.util
import netrc
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from infini.config.schema import Config, LoggerConfig, WandbConfig, key_of
from infini.errors import InputError, first_line, one_of
from infini.records import RunRecord, naming, new_run_id

if TYPE_CHECKING:
    from infini.report.tables import RenderedReport

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}
"""Logger -> required package."""


@dataclass(frozen=True)
class RunLabels:
    """The description of a run that a logger shows beside its curves."""

    run_id: str
    kind: str
    """train, or table."""
    group: str
    """Used where logger.group is null."""
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    """The resolved configuration, and what else identifies the run."""


def labels_of(cfg: Config, record: RunRecord) -> RunLabels:
    """The labels of a training run."""
    named = {"report", "experiment"} & set(map(key_of, record.overrides))
    about = (cfg.report["task"], *cfg.report.get("benchmarks", ()))
    group = cfg.report["name"] if named or cfg.task.name in about else cfg.task.name
    about_run = {key: getattr(record, key) for key in ("run_id", "command", "config_hash", "environment")}
    tags = (cfg.task.name, str(cfg.model["name"]), cfg.scale.name, f"seed {cfg.seed}")
    return RunLabels(record.run_id, record.verb, group, tags, {**asdict(cfg), **about_run})


def check_logger(name: str) -> None:
    """Raises InputError where the package of a logger is not installed, or a variable of Weights & Biases is invalid;
    prints the variables that are ignored."""
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        raise InputError(f"logger={name}: needs a package that is not installed; pip install {PACKAGES[name]}")
    if name != "wandb":
        return
    import wandb

    if mode := os.environ.get("WANDB_MODE"):
        one_of("WANDB_MODE", mode, WANDB_MODES)
    settings = wandb.Settings()
    for name, value in sorted(os.environ.items()):
        if name in WANDB_OF_A_RUN:
            print(f"logger=wandb: {name}={value} is ignored; {WANDB_OF_A_RUN[name]}", file=sys.stderr)
        # An invalid key is reported on connecting, and the curves go offline.
        elif name.startswith("WANDB_") and name not in ("WANDB_MODE", "WANDB_API_KEY"):
            try:
                settings.update_from_env_vars({name: value})
            except ValueError as error:
                # pydantic's errors list their reasons.
                errors = getattr(error, "errors", None)
                reason = errors()[0]["msg"] if callable(errors) else first_line(error)
                raise InputError(f"{name}={value!r}: Weights & Biases does not take it ({reason})") from error


def make_logger(logger: LoggerConfig, folder: Path, labels: RunLabels) -> Any:
    """Lightning's logger of a run, with its files below `folder`; False for none.

    Weights & Biases never prompts: it is offline without a login, unless WANDB_MODE is set, and when it cannot connect
    within WANDB_SECONDS. Raises InputError when the package is not installed, or for a wrong environment variable.
    """
    try:
        if logger.name == "csv":
            return _csv(folder, labels.run_id)
        if logger.name == "tensorboard":
            return _tensorboard(folder, labels)
        if isinstance(logger, WandbConfig):
            from lightning.pytorch.loggers import WandbLogger

            return WandbLogger(experiment=start_wandb(logger, folder, labels))
    except ModuleNotFoundError as error:
        raise InputError(
            f"logger={logger.name}: needs a package that is not installed; pip install {logger.name}"
        ) from error
    return False


def log_tables(logger: WandbConfig, folder: Path, report: RenderedReport) -> None:
    """Log all tables of a report to Weights & Biases, as they are printed, in a run of their own."""
    import wandb

    labels = RunLabels(
        new_run_id("table", report.name, report.scale, 0),
        "table",
        report.name,
        (report.name, report.scale),
        {"report": report.name, "scale": report.scale, "title": report.title, "notes": list(report.notes)},
    )
    run = start_wandb(logger, folder, labels)
    for number, table in enumerate(report.tables, 1):
        rows = [[row.title, *(cell.text for cell in row.cells)] for row in table.rows]
        run.log({f"{report.stem}/table_{number}": wandb.Table(columns=[table.rows_are, *table.columns], data=rows)})
        run.summary[f"{report.stem}/table_{number}_is"] = table.title
    close_loggers()


def close_loggers() -> None:
    """Finish an open Weights & Biases run, which the next training of this process would continue, and print where it
    is: its address, or the folders of its processes and the command that sends them."""
    wandb = sys.modules.get("wandb")
    run = None if wandb is None else getattr(wandb, "run", None)
    if run is None:
        return
    folder = Path(run.settings.sync_dir)
    offline, address = run.settings.mode in ("offline", "dryrun"), run.url
    run.finish()
    if offline:
        # A training that was resumed has a folder for each process; they are sent in order and make one run.
        folders = sorted(folder.parent.glob(f"offline-run-*-{run.id}*"))
        command = shlex.join(["wandb", "sync", *map(str, folders)])
        print(f"logger=wandb: the run is offline, in {folder}\nto send it: {command}", file=sys.stderr)
    elif address:
        print(f"logger=wandb: {address}", file=sys.stderr)


def _csv(folder: Path, run_id: str) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    class NamingLogger(CSVLogger):
        """Names the file in errors of a full disk."""

        def save(self) -> None:
            with naming(Path(self.log_dir) / "metrics.csv"):
                super().save()

    # The logger would delete the file of an earlier process of this run.
    sittings = len(list(folder.glob(f"{run_id}*")))
    return NamingLogger(folder, name="", version=run_id if not sittings else f"{run_id}-{sittings + 1}")


def _tensorboard(folder: Path, labels: RunLabels) -> Any:
    from lightning.pytorch.loggers import TensorBoardLogger

    class NamingLogger(TensorBoardLogger):
        """Names the folder in errors of a full disk."""

        @property
        def experiment(self) -> Any:
            with naming(Path(self.log_dir)):
                return super().experiment

        def log_metrics(self, *given: Any, **options: Any) -> None:
            with naming(Path(self.log_dir)):
                super().log_metrics(*given, **options)

        def save(self) -> None:
            with naming(Path(self.log_dir)):
                super().save()

        def finalize(self, status: str) -> None:
            with naming(Path(self.log_dir)):
                super().finalize(status)

    threading.excepthook = _report_unless_disk_error
    print(
        f"logger=tensorboard: to see the curves: {shlex.join(['tensorboard', '--logdir', str(folder)])}",
        file=sys.stderr,
    )
    made = NamingLogger(folder, name="", version=labels.run_id, default_hp_metric=False)
    made.log_hyperparams({**labels.config, "group": labels.group, "tags": ", ".join(labels.tags)})
    return made


def _report_unless_disk_error(met: threading.ExceptHookArgs) -> None:
    """Reports exceptions of threads, except disk errors of TensorBoard, which it raises again in the training."""
    if not (type(met.thread).__name__ == "_AsyncWriterThread" and isinstance(met.exc_value, OSError)):
        threading.__excepthook__(met)


WANDB_MODES = ("online", "offline", "disabled", "dryrun")
WANDB_SECONDS = {"init_timeout": 20.0, "finish_timeout": 60.0}
"""Time limits of Weights & Biases for connecting and for sending the rest at the end, unless WANDB_INIT_TIMEOUT or
WANDB_FINISH_TIMEOUT are set. `wandb sync` sends what is left after that."""


WANDB_OF_A_RUN = {
    "WANDB_PROJECT": "logger.project decides",
    "WANDB_ENTITY": "logger.entity decides",
    "WANDB_RUN_GROUP": "logger.group decides",
    **dict.fromkeys(("WANDB_NAME", "WANDB_RUN_NAME"), "logger.run_name decides"),
    **dict.fromkeys(("WANDB_TAGS", "WANDB_RUN_TAGS"), "logger.tags decides"),
    **dict.fromkeys(("WANDB_DIR", "WANDB_ROOT_DIR"), "results_dir decides"),
    **dict.fromkeys(
        (
            *("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM", "WANDB_REINIT", "WANDB_LAUNCH"),
            *("WANDB_LAUNCH_CONFIG_PATH", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_CONFIG"),
            *("WANDB_CONFIG_PATHS", "WANDB_JOB_TYPE", "WANDB_RUN_JOB_TYPE", "WANDB_NOTES", "WANDB_RUN_NOTES"),
        ),
        "curves belong to the run of the record",
    ),
}
"""Variable that would choose the run, its place or the run it resumes -> what decides that instead."""


@contextmanager
def _without_variables_of_a_run() -> Iterator[None]:
    # The mode is an argument; a service of another process may have ended with that process.
    names = (*WANDB_OF_A_RUN, "WANDB_MODE", "WANDB_SERVICE")
    taken = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        for name, value in taken.items():
            os.environ.setdefault(name, value)


def start_wandb(logger: WandbConfig, folder: Path, labels: RunLabels) -> Any:
    """A new run of Weights & Biases, or the run of these labels that is resumed, with its files below `folder`.

    Raises InputError for a wrong environment variable.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    asked = os.environ.get("WANDB_MODE")
    mode = asked or ("online" if _logged_in() else "offline")
    one_of("WANDB_MODE", mode, WANDB_MODES)
    why = f" (WANDB_MODE={asked})" if asked else " (nobody is logged in)" if mode == "offline" else ""
    group = logger.group or labels.group
    print(f"logger=wandb: {mode}{why}, project {logger.project}, group {group}", file=sys.stderr)
    with _without_variables_of_a_run():
        return _begin_wandb(mode, logger, group, folder, labels)


def _begin_wandb(mode: str, logger: WandbConfig, group: str, folder: Path, labels: RunLabels) -> Any:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    patience = {key: value for key, value in WANDB_SECONDS.items() if f"WANDB_{key.upper()}" not in os.environ}

    def start_run(mode: str) -> Any:
        settings = wandb.Settings(mode=mode, **patience)  # type: ignore[arg-type]
        return wandb.init(
            id=labels.run_id,
            name=logger.run_name or labels.run_id,
            project=logger.project,
            entity=logger.entity,
            group=group,
            job_type=labels.kind,
            tags=list(dict.fromkeys([*labels.tags, *logger.tags])),
            config=dict(labels.config),
            dir=str(folder),
            resume="allow",
            settings=settings,
        )

    try:
        if mode == "online":
            try:
                return start_run(mode)
            except Exception as error:  # invalid key, no network, no such project: each has its own error
                mode, reason = "offline", first_line(error)
                print(f"logger=wandb: cannot connect ({reason}); continues offline, see `wandb sync`", file=sys.stderr)
                # Its service holds the id of the run that could not start.
                wandb.teardown()
        return start_run(mode)
    except ValueError as error:  # pydantic rejects the value of another WANDB_ variable
        raise InputError(f"logger=wandb: {error}") from error


def _logged_in() -> bool:
    """Whether a key is in the environment, or in the file of `wandb login`."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
