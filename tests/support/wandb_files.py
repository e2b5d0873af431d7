"""Reads an offline run of Weights & Biases: what `wandb sync` would send."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 32768
"""Bytes of the file's header, and of a block of LevelDB's log format, of which the header is a part."""


def records_in(folder: Path) -> list[Any]:
    """The records of the `.wandb` file in the folder of an offline run, whose last one says that it has finished."""
    # The client's service writes on for a moment after the run was finished.
    until = time.monotonic() + 20
    while not (found := _read(folder)) or not found[-1].HasField("exit"):
        assert time.monotonic() < until, f"{folder}: no finished run"
        time.sleep(0.05)
    return found


def _read(folder: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("*.wandb")
    data, offset, parts, found = path.read_bytes(), HEADER, b"", []
    while offset + 7 <= len(data):
        if BLOCK - offset % BLOCK < 7:
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        if offset + 7 + length > len(data):
            break
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        # 1: whole; 2, 3 and 4: first, middle and last part.
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def run_of(folder: Path) -> Any:
    """The run: project, entity, run_group, job_type, display_name, tags, config."""
    return next(record.run for record in records_in(folder) if record.HasField("run"))


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration of the run."""
    return {item.key: json.loads(item.value_json) for item in run_of(folder).config.update}


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The logged points, each with its values by name."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records_in(folder)
        if record.HasField("history")
    ]
