"""Ways to spoil what a command is given: each makes a command line, and the files that it needs."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from command_runner import read_by
from tiny_runs import TINY, write_corpus

from infini.cli import main as cli
from infini.training.checkpoint import DESCRIPTION, checksum
from infini.training.module import LanguageModelModule


@dataclass
class Place:
    """A corpus, results with one trained model, and what a case may spoil: copies of both."""

    folder: Path
    patch: pytest.MonkeyPatch
    undo: contextlib.ExitStack

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def books(self) -> Path:
        return self.folder / "books"

    @property
    def checkpoint(self) -> Path:
        (path,) = (self.results / "checkpoints").iterdir()
        return path

    def line(self, verb: str, *words: str) -> list[str]:
        settings = [*TINY, "logger=none", f"task.data_dir={self.books}", f"results_dir={self.results}"]
        return [verb, *read_by([verb, *words], settings), *words]


Try = Callable[[Place], list[str]]


def lines(*texts: str) -> list[Try]:
    """Command lines that need no files."""
    return [lambda place, text=text: text.split(" ") for text in texts]  # type: ignore[misc]


def trained(*words: str, verb: str = "train") -> list[Try]:
    return [lambda place: place.line(verb, *words)]


def named(verb: str, key: str, *words: str) -> list[Try]:
    """A verb that is given the checkpoint."""
    return [lambda place: place.line(verb, *words, f"{key}={place.checkpoint}")]


def spoiled(name: str, *contents: bytes) -> list[Try]:
    """A training whose book `name` has these contents."""

    def spoil(place: Place, content: bytes) -> list[str]:
        (place.books / "train" / name).write_bytes(content)
        return place.line("train")

    return [lambda place, content=content: spoil(place, content) for content in contents]  # type: ignore[misc]


def damaged(name: str, *changes: Callable[[bytes], bytes], verb: str = "eval") -> list[Try]:
    """A verb that reads the checkpoint, one file of which was changed."""

    def damage(place: Place, change: Callable[[bytes], bytes]) -> list[str]:
        path = place.checkpoint / name
        path.write_bytes(change(path.read_bytes()))
        return place.line(verb, *(["prompt=a"] if verb == "generate" else []))

    return [lambda place, change=change: damage(place, change) for change in changes]  # type: ignore[misc]


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(share * len(content))]


def flipped(share: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        at = int(share * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return flip


class Hostile:
    """Unpickled, it runs code: here it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def hostile_weights(place: Place) -> list[str]:
    (place.checkpoint / "model.safetensors").write_bytes(pickle.dumps(Hostile(place.folder / "ran")))
    return place.line("eval")


def hostile_folder(place: Place) -> list[str]:
    made = place.folder / "foreign"
    made.mkdir()
    torch.save({"state_dict": Hostile(place.folder / "ran")}, made / "model.ckpt")
    return place.line("train", f"init_from={made}")


def damaged_record(content: bytes) -> Try:
    def damage(place: Place) -> list[str]:
        (path,) = (place.results / "runs").glob("*.json")
        path.write_bytes(path.read_bytes()[:99] + content)
        return place.line("table")

    return damage


def changed_digit(place: Place) -> list[str]:
    """The table of a record that says 1 more in its first result."""
    (path,) = (place.results / "runs").glob("*.json")
    text = path.read_text(encoding="utf-8")
    at = re.search(r'"value": \d+\.(\d)', text)
    assert at is not None
    path.write_text(text[: at.start(1)] + str((int(at[1]) + 1) % 10) + text[at.end(1) :], encoding="utf-8")
    return place.line("table")


def nested_record(place: Place) -> list[str]:
    """The table of a record that is nothing but brackets."""
    (path,) = (place.results / "runs").glob("*.json")
    path.write_text("[" * 200_000, encoding="utf-8")
    return place.line("table")


def nested_description(place: Place) -> list[str]:
    """An evaluation of a checkpoint whose description is nothing but brackets."""
    (place.checkpoint / DESCRIPTION).write_text("[" * 200_000, encoding="utf-8")
    return place.line("eval")


def described(verb: str = "eval", **changes: Any) -> Try:
    """A verb that reads a checkpoint whose description says something else (None: nothing), with a fitting checksum."""

    def describe(place: Place) -> list[str]:
        path = place.checkpoint / DESCRIPTION
        description = json.loads(path.read_text(encoding="utf-8")) | changes
        found = {key: value for key, value in description.items() if value is not None and key != "description_sha256"}
        path.write_text(json.dumps(found | {"description_sha256": checksum(found)}), encoding="utf-8")
        words = {"generate": ["prompt=a"], "train": [f"init_from={place.checkpoint}", "seed=2"]}
        return place.line(verb, *words.get(verb, []))

    return describe


def strange_entry(make: Callable[[Path], None]) -> Try:
    """A training on a folder of books in which something is no file."""

    def put(place: Place) -> list[str]:
        make(place.books / "train" / "strange.txt")
        return place.line("train", "seed=2")

    return put


def in_the_way(place: Place) -> list[str]:
    """A folder where the table is to be written."""
    (place.results / "tables" / "table2_lm_laptop.md").mkdir(parents=True)
    return place.line("table", "report.aggregate=newest")


def no_larger_files(most_bytes: int, verb: str = "train") -> Try:
    """The system lets no file grow beyond so many bytes (as `ulimit -f`, or a quota)."""

    def limit(place: Place) -> list[str]:
        resource = pytest.importorskip("resource")
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        place.undo.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most))
        return place.line(verb, *SECOND.get(verb, ()))

    return limit


SECOND = {"train": ("seed=2",)}
"""Settings that make a second run differ from the first."""


def full_disk(call: str, number: int, verb: str = "train") -> Try:
    """No space left at the flush or the rename of this number; like the system's own, the error names no file."""

    def fill(place: Place) -> list[str]:
        real, seen = getattr(os, call), []

        def failing(*given: Any) -> Any:
            seen.append(given)
            if len(seen) == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*given)

        place.patch.setattr(os, call, failing)
        return place.line(verb, *SECOND.get(verb, ()))

    return fill


def full_for(name: str, patch: pytest.MonkeyPatch) -> None:
    """Leave no space, from now on, for writes to files with `name` in their path."""
    real = open

    def opening(file: Any, mode: str = "r", *given: Any, **options: Any) -> Any:
        made = real(file, mode, *given, **options)
        if name in str(file) and not set(mode).isdisjoint("wax+"):
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, made.fileno())
            os.close(full)
        return made

    patch.setattr(builtins, "open", opening)


def full_while_writing(name: str, verb: str = "train") -> Try:
    """The same, for a verb that writes such a file."""

    def fill(place: Place) -> list[str]:
        full_for(name, place.patch)
        return place.line(verb, *SECOND.get(verb, ()))

    return fill


def full_disk_for_weights(place: Place) -> list[str]:
    import safetensors.torch

    def failing(model: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    place.patch.setattr(safetensors.torch, "save_model", failing)
    return place.line("train", "seed=2")


def not_finite(place: Place) -> list[str]:
    real = LanguageModelModule.training_step

    def broken(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == 1:
            self.model.blocks[0].attention.o_proj.register_forward_hook(lambda *given: given[2] * float("nan"))
        return real(self, batch, index)

    place.patch.setattr(LanguageModelModule, "training_step", broken)
    return place.line("train", "seed=2", "optimizer.lr=0.01")


def other_tokenizer(place: Place) -> list[str]:
    write_corpus(place.folder / "others")
    (place.folder / "others" / "train" / "train0.txt").write_text("entirely other words " * 300)
    return place.line("train", f"task.data_dir={place.folder / 'others'}", f"init_from={place.checkpoint}")


def saved_state(change: Callable[[bytes], bytes]) -> Try:
    def save(place: Place) -> list[str]:
        path = place.folder / "state"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            cli.main(place.line("generate", "prompt=a", f"save_state={path}", "decoding.max_new_tokens=1"))
        path.write_bytes(change(path.read_bytes()))
        return place.line("generate", f"load_state={path}")

    return save


def no_folder(place: Place) -> list[str]:
    return place.line("train", f"task.data_dir={place.folder / 'nowhere'}")


def prompt_file(content: bytes | None) -> Try:
    def write(place: Place) -> list[str]:
        if content is not None:
            (place.folder / "book.txt").write_bytes(content)
        return place.line("generate", f"prompt=@{place.folder / 'book.txt'}")

    return write


def own_book(content: bytes | None) -> Try:
    """A book to sum up, which the model of the place is asked for."""

    def write(place: Place) -> list[str]:
        path = place.folder / "book.txt"
        if content is not None:
            path.write_bytes(content)
        return ["summarize", str(path), f"checkpoint={place.checkpoint}", "parallel.accelerator=cpu"]

    return write


def summarised(*rows: dict[str, Any]) -> Try:
    """A training on books with summaries, which are these."""

    def write(place: Place) -> list[str]:
        text = "".join(json.dumps({"bid": 1, "title": "One", **row}) + "\n" for row in rows)
        for split in ("train", "validation"):
            (place.books / f"{split}.jsonl").write_text(text, encoding="utf-8")
        return place.line("train", "task=booksum")

    return write
