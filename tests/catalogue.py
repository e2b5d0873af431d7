"""What infini answers to bad input, case by case; `python tests/catalogue.py` writes the table docs/bad_input.md."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, write_corpus

import cli
from infini import records
from infini.training.module import LanguageModelModule

TABLE = Path(__file__).parent.parent / "docs" / "bad_input.md"


@dataclass
class Place:
    """A corpus, results with one trained model, and what a case may spoil: copies of both."""

    folder: Path
    patch: pytest.MonkeyPatch

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
        return [verb, *TINY, "logger=none", f"task.data_dir={self.books}", f"results_dir={self.results}", *words]


Try = Callable[[Place], list[str]]


@dataclass(frozen=True)
class Case:
    """Something that is wrong, and command lines that have it."""

    name: str
    tries: list[Try]


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


def full_disk(call: str, number: int) -> Try:
    """No space left at the flush or the rename of this number."""

    def fill(place: Place) -> list[str]:
        real, seen = getattr(os, call), []

        def failing(*given: Any) -> Any:
            seen.append(given)
            if len(seen) == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
            return real(*given)

        place.patch.setattr(os, call, failing)
        return place.line("train", "seed=2")

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
    return place.line("train", "seed=2")


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
        (place.books / "train.jsonl").write_text(text, encoding="utf-8")
        return place.line("train", "task=booksum")

    return write


CASES = [
    Case("an unknown verb", lines("trian", "evaluate", "Train", "-x")),
    Case("an unknown choice of a group", lines("train model=infini_liner", "train task=pg18", "table report=table9")),
    Case(
        "an unknown key", lines("train dims.d_modell=64", "train optimzer.lr=1", "eval lenght=1M", "train recipe.x.y=1")
    ),
    Case("a value of the wrong kind", lines("train seed=x", "train dims.n_layers=2.5", "train recipe.steps=many")),
    Case("a value out of range", lines("train recipe.steps=0", "train dims.n_heads=0", "train optimizer.lr=-1")),
    Case("values that do not fit each other", lines("train dims.n_heads=4 dims.n_kv_heads=3")),
    Case(
        "a length that is none",
        lines(*(f"eval task=passkey length={text}" for text in ("1X", "0", "-1", "1e6", "", "1.5K", "32K,1X"))),
    ),
    Case("a depth that is none", lines("eval task=passkey depth=middel", "eval task=passkey depth=1.5")),
    Case(
        "a model that the task does not take",
        lines("train model=bart", "train task=passkey model=primera", "eval task=passkey model=bart checkpoint=none"),
    ),
    Case("several values without -m", lines("train seed=1,2", "train model=local,full")),
    Case("a data folder that is not there", [no_folder]),
    Case("a book that is empty", spoiled("train1.txt", b"", b" \n\n")),
    Case("a book that is binary", spoiled("train1.txt", bytes(range(256)) * 20, b"\x89PNG\r\n\x1a\n" + b"\x00" * 99)),
    Case("a book in UTF-16", spoiled("train1.txt", "A book.".encode("utf-16"), "A book.".encode("utf-16-be"))),
    Case(
        "a report without a split", [*trained("report=lr_search", verb="eval"), *trained("report=claims", verb="eval")]
    ),
    Case("a checkpoint that is not there", [*trained("checkpoint=none", verb="eval"), *trained("init_from=none")]),
    Case("a folder that is no checkpoint", [lambda place: place.line("eval", f"checkpoint={place.books}")]),
    Case("a checkpoint cut short", damaged("model.safetensors", *(cut(k / 10) for k in range(10)))),
    Case("a bit of the weights flipped", damaged("model.safetensors", *(flipped(k / 20) for k in range(21)))),
    Case("a bit of the description flipped", damaged("config.json", *(flipped(k / 20) for k in range(21)))),
    Case(
        "a damaged tokenizer",
        [*damaged("tokenizer.json", cut(0), cut(0.5)), *damaged("tokenizer.json", cut(0.5), verb="generate")],
    ),
    Case("a checkpoint of another model", named("eval", "checkpoint", "model=local")),
    Case("a checkpoint of other sizes", trained("dims.d_model=32", verb="eval")),
    Case("weights of other sizes to start from", named("train", "init_from", "dims.d_model=32")),
    Case("a checkpoint of another tokenizer", [other_tokenizer]),
    Case("a pickle that would run code", [hostile_weights, hostile_folder]),
    Case("a damaged record", [damaged_record(b""), damaged_record(b"\x00\xff"), damaged_record(b"}")]),
    Case(
        "no space left",
        [full_disk_for_weights, *(full_disk(call, k) for call in ("fsync", "replace") for k in (1, 2, 3))],
    ),
    Case(
        "a results_dir that cannot be written",
        [
            *trained("results_dir=/proc/infini"),
            *trained("results_dir=/dev/null/x"),
            *trained("results_dir=" + "a" * 300),
        ],
    ),
    Case(
        "a cache_dir that cannot be written",
        [*trained("cache_dir=/proc/infini"), *trained("cache_dir=/dev/null/x")],
    ),
    Case("a loss that is not finite", [not_finite]),
    Case("a prompt that cannot be read", [prompt_file(None), prompt_file(b"\xff\xfe\x00"), *trained(verb="generate")]),
    Case(
        "a book to sum up that is none",
        [own_book(content) for content in (None, b"", b" \n\n", b"text\0", b"text\xff", "A book.".encode("utf-16"))],
    ),
    Case(
        "a book without a summary or a text",
        [
            summarised({"text": "A book.", "summary": []}),
            summarised({"text": None, "summary": [{"text": "A summary."}]}),
            summarised({"book": "none.txt", "summary": [{"text": "A summary."}]}),
        ],
    ),
    Case(
        "two books of one number",
        [summarised(*({"text": text, "summary": [{"text": "A summary."}]} for text in ("One.", "Two.")))],
    ),
    Case("a damaged state", [saved_state(cut(0.5)), saved_state(flipped(0.9)), saved_state(cut(0))]),
]


def answer(arguments: list[str]) -> tuple[int, list[str]]:
    """Exit code, and what was said on standard error but for progress."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    return code, err.getvalue().splitlines()


def prepare(folder: Path) -> Path:
    """Books and a model that each try gets a copy of."""
    write_corpus(folder / "books")
    words = [*TINY, "logger=none", f"task.data_dir={folder / 'books'}", f"results_dir={folder / 'results'}"]
    code, said = answer(["train", *words])
    assert code == 0, said
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Everything below it that a run could spoil: not its unfinished work."""
    found = (path for path in folder.rglob("*") if path.is_file() and "unfinished" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@contextlib.contextmanager
def place(prepared: Path, folder: Path) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        shutil.copytree(prepared, folder)
        patch.chdir(folder.parent)
        patch.setattr(records, "published_dir", lambda: folder / "published")
        yield Place(folder, patch)


def try_out(case: Case, prepared: Path, folder: Path) -> list[str]:
    """The answer to every try of a case, without the names of temporary folders. AssertionError where
    one is no answer."""
    answers = []
    for number, attempt in enumerate(case.tries):
        with place(prepared, folder / str(number)) as made:
            arguments = attempt(made)
            before = files(made.folder)
            code, said = answer(arguments)
            after = files(made.folder)
        wrong = (case.name, number, arguments, said)
        errors = [line for line in said if line.startswith("infini: error: ")]
        assert code == cli.USAGE_ERROR and len(errors) == 1 and said[-1] == errors[0], wrong
        assert not any("Traceback" in line for line in said), wrong
        assert before.items() <= after.items(), wrong
        # A training that found no room for its weights has its tokenizer there already, and goes on with it.
        assert {Path(name).name for name in set(after) - set(before)} <= {"tokenizer.json"}, wrong
        text = errors[0].removeprefix("infini: error: ").replace(str(made.folder), "DIR")
        answers.append(re.sub(r"\d{8}T\d{6}Z-train-[\w-]+", "RUN", text))
    return answers


def table(prepared: Path, folder: Path) -> str:
    answers = {case.name: try_out(case, prepared, folder / case.name.replace(" ", "_")) for case in CASES}
    rows = [f"| {name} | {len(said)} | `{said[0]}` |" for name, said in answers.items()]
    return "\n".join(
        [
            "# Bad input",
            "",
            f"Each case below was tried as often as the table says ({sum(map(len, answers.values()))} times in all)",
            "by `tests/test_catalogue.py`: every time the answer was one line and exit code 2, without a traceback,",
            "every file that was there before was the same afterwards, and nothing was half-written. DIR and RUN stand",
            "for a folder and a run's name. A book of one line of 100 MB is read like any other",
            "(`test_text.py::test_a_book_of_one_long_line_is_read`, by `make test-slow`).",
            "",
            "| Case | Tries | Answer to the first |",
            "| --- | ---: | --- |",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.environ["INFINI_CACHE_DIR"] = str(Path(name) / "cache")
        made = prepare(Path(name) / "prepared")
        TABLE.write_text(table(made, Path(name) / "tries"), encoding="utf-8")
    print(TABLE)
