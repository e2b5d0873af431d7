"""Run records: one JSON file per run, from which all tables and figures are made.

A record is written once and atomically: to a temporary file in the same folder, which is flushed to disk and renamed.
This module does not import torch, so that tables and help are fast.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Any, get_origin, get_type_hints

from infini.errors import InputError

SCHEMA = 1

VERSIONED_PACKAGES = (
    *("torch", "lightning", "hydra-core", "numpy", "datasets", "tokenizers", "transformers", "safetensors"),
    *("wandb", "rouge-score"),
)


def start_of(config: Mapping[str, Any]) -> str | None:
    """Run id of the training from which a training with this configuration starts; None for fresh weights. Where
    `init_from` is the path of a checkpoint, its folder's name is taken for the run id; see RunRecord.traced_config."""
    return Path(config["init_from"]).name if config.get("init_from") else None


@dataclass
class RunRecord:
    """A run: identity, environment, data and results."""

    run_id: str
    """The id from `new_run_id`; also the name of the file."""
    verb: str
    """train, eval or bench."""
    task: str
    model: str
    scale: str
    seed: int
    parent: str | None
    """Run id of the training run whose checkpoint this run used; null for a training run."""
    command: str
    """The command line, quoted for a shell."""
    overrides: list[str]
    config: dict[str, Any]
    """The resolved configuration."""
    config_hash: str
    started: str
    """UTC time of the start, ISO 8601."""
    environment: dict[str, Any]
    """The result of `environment` when the run started. started_from: the run id in the checkpoint that a training's
    `init_from` names; older records lack it."""
    data: dict[str, Any] = field(default_factory=dict)
    """name, source (folder, hub or synthetic), revision (content hash), split, documents, tokens, words, bytes,
    tokenizer. beside: bytes and sha256 of each file beside the record, by its suffix."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """metric -> {value, n, unit, higher_is_better}."""
    cost: dict[str, Any] = field(default_factory=dict)
    """wall_seconds, peak_memory_bytes, tokens_seen, state_floats, parameters.

    peak_memory_bytes is the peak since this run began, in the last process if it was resumed: of the GPU's memory, or
    on a CPU of the resident memory of the process with its libraries. In older records, and where the system cannot
    reset it, it is the peak since the process began, which may be that of an earlier run of a sweep or a table. Cells
    and answers of a passkey evaluation have the peak since the answers before them."""
    documents: list[dict[str, Any]] = field(default_factory=list)
    """One entry per document: name, tokens, words, bytes, nll (total, in nats) and other measurements."""
    series: dict[str, Any] = field(default_factory=dict)
    """Data of figures: curves and grids."""
    diverged: dict[str, Any] | None = None
    """Step and reason of a training that diverged, which has neither results nor model. None for all other runs, whose
    files omit it."""
    schema: int = SCHEMA

    @property
    def started_from(self) -> str | None:
        """Run id of the training from which this one started; None for a training from fresh weights."""
        # The folder that init_from names may have another name than the run.
        return self.environment.get("started_from") or start_of(self.config)

    @property
    def traced_config(self) -> dict[str, Any]:
        """The configuration, with `started_from` as its `init_from`."""
        return self.config if self.started_from is None else {**self.config, "init_from": self.started_from}

    @property
    def synthetic(self) -> bool:
        """Whether the run used synthetic text instead of the task's data."""
        return self.data.get("source") == "synthetic"

    def metric(self, name: str) -> float | None:
        """The value of one result; None where the run did not measure it."""
        value = self.results.get(name, {}).get("value")
        return None if value is None else float(value)

    def to_json(self) -> str:
        """The record as JSON text, with a checksum. Numbers that are not finite become null: JSON has no NaN."""
        content = _plain(asdict(self))
        if self.diverged is None:
            del content["diverged"]
        return _dumps(content | {"sha256": _checksum(_dumps(content))})

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """The record in a text of `to_json`.

        Raises ValueError for what is not JSON or not a record of this schema, and a missing or wrong checksum.
        """
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        if raw.get("schema") != SCHEMA:
            raise ValueError(f"schema={raw.get('schema')!r}: this version reads schema {SCHEMA}")
        sha256 = raw.pop("sha256", None)
        known = {entry.name for entry in fields(cls)}
        if wrong := sorted(known ^ {"diverged", *raw}):
            raise ValueError(f"missing or unknown fields: {', '.join(wrong)}")
        for name, kind in _FIELD_KINDS.items():
            if not isinstance(raw[name], kind):
                raise ValueError(f"field {name!r} holds a {type(raw[name]).__name__}")
        if not isinstance(raw.get("diverged"), dict | None):
            raise ValueError("field 'diverged' is not an object")
        if sha256 is None:
            raise ValueError("it has no checksum")
        # Without this line a text of to_json is what the checksum is of. Only another layout of the same content has
        # to be written again, which takes ten times as long as all the rest.
        as_written = text.replace(f'\n "sha256": "{sha256}",\n', "\n", 1)
        if sha256 != _checksum(as_written) and sha256 != _checksum(_dumps(raw)):
            raise ValueError("checksum mismatch")
        for name, entry in raw["results"].items():
            if not isinstance(entry, dict) or not isinstance(entry.get("value"), int | float | None):
                raise ValueError(f"result {name!r} has no value")
        if not all(isinstance(entry, dict) for entry in raw["documents"]):
            raise ValueError("field 'documents' has an entry that is not an object")
        return cls(**raw)


_FIELD_KINDS = {
    name: hint if isinstance(hint, UnionType) else get_origin(hint) or hint
    for name, hint in get_type_hints(RunRecord).items()
    if name != "diverged"
}


def _dumps(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """`value` in JSON's own types; arrays, tensors and paths are turned into lists, numbers and text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} cannot be written to a run record")


def utc_now() -> str:
    """The UTC time, ISO 8601, in microseconds, by which runs are ordered."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def new_run_id(verb: str, task: str, model: str, seed: int) -> str:
    """A new run id of letters, digits, `-` and `_`: UTC time, verb, task, model, seed, and six random hex digits."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{stamp}-{verb}-{task}-{model}-s{seed}-{secrets.token_hex(3)}")


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write `content` to `path`; readers see either the old or the new file, never a part.

    Folders are created. If writing fails, no temporary file remains and the old file stays. Raises InputError where
    `path` exists and is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: exists and is not a regular file; remove it, or write to another place")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        sync_and_rename(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        name_file(error, path)
        raise


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left of `path`, which no other process may be writing."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        left.unlink(missing_ok=True)


def sync_and_rename(temporary: Path, path: Path) -> None:
    """Flush a file to disk, then give it its name, under which a part is never seen, even after a power failure."""
    with open(temporary, "r+b") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def check_writable(results_dir: str) -> None:
    """Raise InputError when results_dir cannot be written."""
    try:
        Path(results_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results_dir):
            pass
    except OSError as error:
        raise InputError(
            f"results_dir={results_dir!r}: cannot be written ({error.strerror}); name a writable folder"
        ) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this path to system errors inside the block that name no file."""
    try:
        yield
    except OSError as error:
        name_file(error, path)
        raise


def name_file(error: BaseException, path: Path) -> None:
    """Add a path to a system error that names no file, as errors of writing."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


def record_path(results_dir: str | Path, run_id: str) -> Path:
    """The path of a run's record."""
    return Path(results_dir) / "runs" / f"{run_id}.json"


def write_record(record: RunRecord, results_dir: str | Path) -> Path:
    """Write `record` to `<results_dir>/runs/<run_id>.json` atomically and return that path.

    Raises InputError for a run id that holds something other than letters, digits, `-` and `_`.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", record.run_id):
        raise InputError(f"run_id={record.run_id!r}: only letters, digits, '-' and '_' are allowed")
    path = record_path(results_dir, record.run_id)
    remove_leftovers(path)
    write_atomically(path, record.to_json().encode())
    for written in _LISTENING:
        written.append(record.run_id)
    return path


_LISTENING: list[list[str]] = []
"""The lists of all open written_records."""


@contextmanager
def written_records() -> Iterator[list[str]]:
    """The run ids of the records that this process writes inside the block; the list grows with them."""
    written: list[str] = []
    _LISTENING.append(written)
    try:
        yield written
    finally:
        # Compared by identity, because two empty lists are equal.
        _LISTENING[:] = [other for other in _LISTENING if other is not written]


_KEPT: dict[Path, tuple[tuple[int, int, int], RunRecord]] | None = None
"""Inside keep_read: path -> identity of the file, record."""


@contextmanager
def keep_read(keep: bool = True) -> Iterator[None]:
    """Inside the block a record is read from disk once. With keep=False nothing is kept inside the block, and what was
    kept before it is dropped: a run does not hold records that it does not need.

    It serves tables of many cells, each of which looks through all records. Nothing may change a record that it was
    given.
    """
    global _KEPT
    before = _KEPT is not None
    _KEPT = {} if keep else None
    try:
        yield
    finally:
        _KEPT = {} if before else None


def read_record(path: str | Path) -> RunRecord:
    """Read one record. Raises InputError where the file cannot be read, is damaged, or is not named after its run."""
    path = Path(path)
    if _KEPT is None:
        return _read(path)
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"{path}: damaged run record: {error}") from error
    identity = status.st_ino, status.st_size, status.st_mtime_ns
    was, record = _KEPT.get(path, (None, None))
    if record is None or was != identity:
        record = _read(path)
        _KEPT[path] = identity, record
    return record


def _read(path: Path) -> RunRecord:
    try:
        record = RunRecord.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged run record: {error}") from error
    if record.run_id != path.stem:
        raise InputError(f"{path}: damaged run record: it holds run {record.run_id!r}")
    return record


def load_records(results_dir: str | Path) -> list[RunRecord]:
    """All records in `<results_dir>/runs`, oldest first. Raises InputError that names a damaged one."""
    # All objects of parsed JSON live on. Garbage collections would look at them again and again, which takes two thirds
    # of the time when torch is imported.
    collects = gc.isenabled()
    gc.disable()
    try:
        found = [read_record(path) for path in sorted((Path(results_dir) / "runs").glob("*.json"))]
    finally:
        if collects:
            gc.enable()
    return sorted(found, key=lambda record: (record.started, record.run_id))


SOURCE_ROOT = Path(__file__).resolve().parents[1]
"""The parent folder of the `infini` package: the project's root in a checkout."""


def in_checkout() -> bool:
    """Whether this package is imported from a checkout of the project, not from where it is installed."""
    return (SOURCE_ROOT / "pyproject.toml").is_file()


def published_dir() -> Path:
    """The folder of published results: `results` of the checkout, or of the working directory outside one."""
    return (SOURCE_ROOT if in_checkout() else Path.cwd()) / "results"


WHERE_PUBLISHED = (
    "published records: not part of the installed package; they are in the project's repository, folder results/runs "
    "(copied to ./results/runs, they fill the rows `published`)"
)


def _git(root: Path, *arguments: str) -> str | None:
    # A git hook sets variables as GIT_DIR, with which git would report on the hook's repository.
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, env=surroundings
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


CODE = ("infini", "tasks", "conf", ":(glob)*.py", ":(glob)*.toml")
"""Paths where a new file changes what runs. Any other file that git does not know is the user's own."""
NO_CODE = ("results", "docs", "tests")
"""Folders on which no run depends; publishing writes into the first."""


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout at `root` when this process first asked, and whether files differ from it since.

    See changed_files. A process that runs for a night keeps the commit that it was started from: its code is not that
    of a commit that is checked out meanwhile. Both are None where `root` is not the top of a git repository with a
    commit, as for an installed package.
    """
    revision = _first_revision(root)
    changed = None if revision is None else changed_files(root, revision)
    return revision, None if changed is None else bool(changed)


_first_revisions: dict[Path, str] = {}


def _first_revision(root: Path) -> str | None:
    if root not in _first_revisions:
        top = _git(root, "rev-parse", "--show-toplevel")
        if top is None or Path(top).resolve() != root.resolve():
            return None
        # Where git does not answer now, a later run asks again.
        if revision := _git(root, "rev-parse", "--verify", "HEAD"):
            _first_revisions[root] = revision
    return _first_revisions.get(root)


def changed_files(root: Path, revision: str = "HEAD") -> list[str] | None:
    """The files of the checkout at `root` that differ from a commit; None where git does not tell.

    Changed files count, and new ones in CODE. Files that git ignores do not, and those of NO_CODE do not.
    """
    changed = _git(root, "diff", "--name-only", revision, "--", ".", *(f":(exclude){folder}" for folder in NO_CODE))
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *CODE)
    return None if changed is None or new is None else [*changed.splitlines(), *new.splitlines()]


def describe_changes(environment: Mapping[str, Any]) -> str:
    """ " (a.py, b.py)": the first uncommitted changes of a run, as far as its environment names them."""
    names = environment.get("git_changes") or ()
    return f" ({', '.join(names)})" if names else ""


def _hardware() -> dict[str, Any]:
    texts = {"cpuinfo": "", "meminfo": ""}
    for name in texts:
        with suppress(OSError):
            texts[name] = Path("/proc", name).read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^model name\s*:\s*(.+)$", texts["cpuinfo"], re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", texts["cpuinfo"], re.MULTILINE)
    total = re.search(r"^MemTotal:\s*(\d+) kB", texts["meminfo"], re.MULTILINE)
    # A run without torch uses no accelerator, so torch is not imported for this.
    torch, accelerator = sys.modules.get("torch"), None
    if torch is not None and torch.cuda.is_available():
        count, accelerator = torch.cuda.device_count(), str(torch.cuda.get_device_name(0))
        accelerator = accelerator if count == 1 else f"{count} x {accelerator}"
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(int(total[1]) / 2**20, 1) if total else None,
        "accelerator": accelerator,
        "has_amx": "amx_tile" in flags[1].split() if flags else False,
    }


def environment(root: Path = SOURCE_ROOT) -> dict[str, Any]:
    """Commit, hardware and versions of this process. Call it when a run starts, before it writes files.

    root: the checkout whose commit is recorded.
    """
    revision, dirty = git_state(root)
    elsewhere = _parts_of_another_checkout(root)
    changes = [*elsewhere, *(changed_files(root, revision) or ())] if revision and (dirty or elsewhere) else None
    if revision and elsewhere:
        dirty = True
    versions = {}
    for package in VERSIONED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "git_revision": revision,
        "git_dirty": dirty,
        **({"git_changes": changes[:3]} if changes else {}),
        "hardware": _hardware(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _parts_of_another_checkout(root: Path) -> list[str]:
    """Folders of the project that this process takes from elsewhere than its own checkout, as it does in a second
    checkout named by PYTHONPATH beside an editable installation of the first."""
    if root != SOURCE_ROOT:
        return []
    found = [importlib.util.find_spec(f"infini.{name}") for name in ("conf", "tasks")]
    places = [Path(place).resolve() for spec in found if spec for place in spec.submodule_search_locations or ()]
    return [str(place) for place in places if not place.is_relative_to(root)]


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key, such as "dims.d_model", in a recorded configuration; None where there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


_OLDER = {"transformer_xl": "", "infini_xl": "", "memorizing": "", "compressive": "memory_segments"}
"""Model with an XL cache -> option with its length in segments (empty: one), for trainings whose records do not have
`cost.xl_cache` yet."""
_WHOLE_CONTEXT = ("llama", "olmo2", "smollm3")
"""Families of pretrained models without layers that see a sliding window alone."""


def carried_floats(run: RunRecord, training: Mapping[str, Any]) -> float | None:
    """Floats that a model carries from one segment into the next; None if they are not known.

    The model says it. For older records it follows from the configuration: attention over a window of several segments
    keeps the keys and values of the earlier ones, at most window_segments - 1, which are not in its memory leaves.
    training: the configuration of its training.
    """
    if "carried_floats" in run.cost:
        return None if (said := run.cost["carried_floats"]) is None else float(said)
    dims, options = training.get("dims") or {}, training.get("model") or {}
    window = options.get("window_segments")
    if options.get("memory") == "full":
        # A pretrained model with its whole context, of which a call reads the last segment.
        tokens, length = value_at(training, "scale.eval_max_tokens"), dims.get("segment_length")
        known = (run.environment.get("base") or {}).get("family") in _WHOLE_CONTEXT
        window = -(-tokens // length) if known and tokens is not None and length is not None else None
    # Older records of full attention do not have the option.
    if window is None and "full" not in (run.model, options.get("memory")):
        found = run.cost.get("state_floats")
        return None if found is None else float(found)
    if window is None or not {"d_key", "n_heads", "n_layers", "segment_length"} <= set(dims):
        return None
    heads = dims["n_heads"] if dims.get("n_kv_heads") is None else dims["n_kv_heads"]
    values = dims["d_key"] if dims.get("d_value") is None else dims["d_value"]
    return float((dims["d_key"] + values) * heads * dims["n_layers"] * (window - 1) * dims["segment_length"])


def xl_cache(run: RunRecord, training: RunRecord | None) -> int | None:
    """Tokens before the segment whose keys and values, or layer inputs, every layer keeps uncompressed; None: none.

    The model says it, in the record of its training. Older records do not have it.
    """
    if training is not None and "xl_cache" in training.cost:
        return training.cost["xl_cache"] or None
    config = (training or run).config
    length = (config.get("dims") or {}).get("segment_length")
    options = config.get("model") or {}
    if length is not None and training is None and "base" in options and options.get("window") == "previous":
        # A pretrained model as it is has no training.
        return int(length)
    if length is None or run.model not in _OLDER:
        return None
    return int(length * options.get(_OLDER[run.model], 1))
