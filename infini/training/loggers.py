"""Loggers of training curves: a CSV file, Weights & Biases, TensorBoard, or none."""

from __future__ import annotations

import importlib.util
import netrc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from infini.errors import InputError, one_of
from infini.records import naming

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}
"""Logger -> required package."""


def check_logger(name: str) -> None:
    """Raises InputError where the package of a logger is not installed, or a variable of Weights & Biases is invalid;
    prints the variables that are ignored."""
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        raise InputError(f"logger={name}: needs a package that is not installed; pip install {PACKAGES[name]}")
    if name == "wandb":
        _check_variables()


def make_logger(name: str, folder: Path, run_id: str) -> Any:
    """Lightning's logger `name` (see LoggerConfig), with its files below `folder`; False for none.

    Weights & Biases never prompts: it is offline without a login, unless WANDB_MODE is set, and when it cannot connect
    within WANDB_SECONDS. Raises InputError when the package is not installed, or for a wrong environment variable.
    """
    try:
        if name == "csv":
            return _csv(folder, run_id)
        if name == "tensorboard":
            return _tensorboard(folder, run_id)
        if name == "wandb":
            return _wandb(folder, run_id)
    except ModuleNotFoundError as error:
        raise InputError(f"logger={name}: needs a package that is not installed; pip install {name}") from error
    return False


def close_loggers() -> None:
    """Finish an open Weights & Biases run, which the next training of this process would continue."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.finish()


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


def _tensorboard(folder: Path, run_id: str) -> Any:
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

    threading.excepthook = _but_for_the_disk
    return NamingLogger(folder, name="", version=run_id)


def _but_for_the_disk(met: threading.ExceptHookArgs) -> None:
    """Reports exceptions of threads, except disk errors of TensorBoard, which it raises again in the training."""
    if not (type(met.thread).__name__ == "_AsyncWriterThread" and isinstance(met.exc_value, OSError)):
        threading.__excepthook__(met)


WANDB_MODES = ("online", "offline", "disabled", "dryrun")
WANDB_SECONDS = {"init_timeout": 20.0, "finish_timeout": 60.0}
"""Time limits of Weights & Biases for connecting and for sending the rest at the end, unless WANDB_INIT_TIMEOUT or
WANDB_FINISH_TIMEOUT are set. `wandb sync` sends what is left after that."""


WANDB_OF_A_RUN = (
    *("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RUN_NAME", "WANDB_PROJECT", "WANDB_DIR", "WANDB_ROOT_DIR"),
    *("WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM", "WANDB_REINIT", "WANDB_LAUNCH"),
    *("WANDB_LAUNCH_CONFIG_PATH", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_CONFIG", "WANDB_CONFIG_PATHS"),
)
"""Variables that choose the run, its files, and the run it resumes; here the record decides these."""


def _check_variables() -> None:
    import wandb

    if mode := os.environ.get("WANDB_MODE"):
        one_of("WANDB_MODE", mode, WANDB_MODES)
    settings = wandb.Settings()
    for name, value in sorted(os.environ.items()):
        if name in WANDB_OF_A_RUN:
            print(f"logger=wandb: {name}={value} is ignored: curves belong to the run of the record", file=sys.stderr)
        # An invalid key is reported on connecting, and the curves go offline.
        elif name.startswith("WANDB_") and name not in ("WANDB_MODE", "WANDB_API_KEY"):
            try:
                settings.update_from_env_vars({name: value})
            except ValueError as error:
                raise InputError(f"{name}={value!r}: Weights & Biases does not take it ({_reason(error)})") from error


def _reason(error: ValueError) -> str:
    """The reason in an error of pydantic, or in the first line of another."""
    found = getattr(error, "errors", None)
    return str(found()[0]["msg"]) if callable(found) else str(error).strip().splitlines()[0]


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


def _wandb(folder: Path, run_id: str) -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")
    mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
    one_of("WANDB_MODE", mode, WANDB_MODES)
    with _without_variables_of_a_run():
        return _begin_wandb(mode, folder, run_id)


def _begin_wandb(mode: str, folder: Path, run_id: str) -> Any:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    folder.mkdir(parents=True, exist_ok=True)
    patience = {key: value for key, value in WANDB_SECONDS.items() if f"WANDB_{key.upper()}" not in os.environ}

    def begun(mode: str) -> Any:
        settings = wandb.Settings(mode=mode, **patience)  # type: ignore[arg-type]
        run = wandb.init(id=run_id, name=run_id, project="infini", dir=str(folder), resume="allow", settings=settings)
        return WandbLogger(experiment=run)

    try:
        if mode == "online":
            try:
                return begun(mode)
            except Exception as error:  # invalid key, no network, no such project: each has its own error
                mode, reason = "offline", (str(error).strip() or type(error).__name__).splitlines()[0]
                print(f"logger=wandb: cannot connect ({reason}); continues offline, see `wandb sync`", file=sys.stderr)
                # Its service holds the id of the run that could not start.
                wandb.teardown()
        return begun(mode)
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
