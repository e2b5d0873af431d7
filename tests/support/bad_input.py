"""Answers of infini to bad input, case by case.

`python tests/support/bad_input.py` writes docs/reference/bad_input.md.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from spoiling import (
    Place,
    Try,
    changed_digit,
    cut,
    damaged,
    damaged_record,
    described,
    flipped,
    full_disk,
    full_disk_for_weights,
    full_while_writing,
    hostile_folder,
    hostile_weights,
    in_the_way,
    lines,
    named,
    nested_description,
    nested_record,
    no_folder,
    no_larger_files,
    not_finite,
    other_tokenizer,
    own_book,
    prompt_file,
    saved_state,
    spoiled,
    strange_entry,
    summarised,
    trained,
)
from tiny_runs import TINY, write_corpus

from infini import records
from infini.cli import main as cli

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "bad_input.md"


@dataclass(frozen=True)
class Case:
    """Something that is wrong, and command lines that have it."""

    name: str
    tries: list[Try]


CASES = [
    Case("an unknown verb", lines("trian", "evaluate", "Train", "-x")),
    Case("an unknown choice of a group", lines("train model=infini_liner", "train task=pg18", "table report=table9")),
    Case(
        "an unknown key", lines("train dims.d_modell=64", "train optimzer.lr=1", "eval lenght=1M", "train recipe.x.y=1")
    ),
    Case(
        "a value of the wrong kind",
        lines("train seed=x", "train dims.n_layers=2.5", "train recipe.steps=many", "reproduce plan=2"),
    ),
    Case("a value out of range", lines("train recipe.steps=0", "train dims.n_heads=0", "train optimizer.lr=-1")),
    Case(
        "an option of a model out of range",
        [*trained("model.rope_base=0"), *trained("model=rmt", "model.rope_base=-3")],
    ),
    Case(
        "sizes that no memory holds",
        [
            *trained("dims.d_model=99999999999"),
            *trained("recipe.batch_size=1000000000"),
            *trained(f"dims.d_model={10**17}"),
            *trained(f"dims.d_model={10**22}"),
            *trained(f"dims.segment_length={10**18}"),
            *trained(f"recipe.segments_per_sequence={10**18}"),
            *trained(f"scale.vocab_size={10**18}"),
            *trained("-m", "dims.d_model=99999999999"),
        ],
    ),
    Case("a strategy that is missing", [*trained("parallel.strategy=fsdp"), *trained("parallel.strategy=deepspeed")]),
    Case("a word that is not UTF-8", [*trained("results_dir=/tmp/\udce9"), *trained("prompt=\udce9", verb="generate")]),
    Case(
        "a key that the verb does not read",
        lines("train checkpoint=zz", "train -m checkpoint=zz seed=1", "table prompt=a", "train task=passkey length=1K"),
    ),
    Case("inconsistent values", lines("train dims.n_heads=4 dims.n_kv_heads=3")),
    Case(
        "an invalid length",
        lines(
            *(
                f"eval task=passkey length={text}"
                for text in ("1X", "0", "-1", "1e6", "", "1.5K", "32K,1X", "32kb", "9999999M")
            ),
            "eval -m task=passkey length=1e6",
            "eval -m task=passkey length=[32K],[1K,1e6]",
            "eval task=booksum task.input_length=1e6",
        ),
    ),
    Case(
        "an invalid part",
        lines(
            *(f"eval part={text}" for text in ("5/4", "x", "0/4", "1/0", "2", "", "-1/4", "[1,2]", "1.5", "1/2/4")),
            "eval -m part=1/4,5/4",
            "train part=1/4",
            "eval task=booksum task.reference=lead part=1/2",
        ),
    ),
    Case("an invalid depth", lines("eval task=passkey depth=middel", "eval task=passkey depth=1.5")),
    Case(
        "a demo with an invalid key, place or length",
        lines(
            *(f"demo key={text}" for text in ("1234", "123456", "12a45", "", "-1234", "1e4", "[1]", "١٢٣٤٥")),
            *(f"demo place={text}" for text in ("1.5", "-0.1", "nan", "1e-3", "nowhere", "", "0_1", "null")),
            *("demo length=10", "demo length=0", "demo length=1e6", "demo length=1M,2M", "demo length=null"),
            *("demo seed=1", "demo 12345", "demo -m key=12345", "demo parallel.accelerator=tpu"),
        ),
    ),
    Case(
        "a model that the task does not support",
        [
            *lines("train model=bart", "train task=passkey model=primera"),
            *lines("eval task=passkey model=bart checkpoint=none"),
            *trained("suite=train", "suite.models=[local,bart]", verb="bench"),
        ],
    ),
    Case("several values without -m", lines("train seed=1,2", "train model=local,full")),
    Case("a data folder that is not there", [no_folder]),
    Case("a book that is empty", spoiled("train1.txt", b"", b" \n\n")),
    Case("a book that is binary", spoiled("train1.txt", bytes(range(256)) * 20, b"\x89PNG\r\n\x1a\n" + b"\x00" * 99)),
    Case("a book in UTF-16", spoiled("train1.txt", "A book.".encode("utf-16"), "A book.".encode("utf-16-be"))),
    Case(
        "a book that is not a regular file",
        [
            strange_entry(lambda path: path.symlink_to("nothing")),
            strange_entry(lambda path: path.symlink_to(path)),
            strange_entry(lambda path: path.mkdir()),
        ],
    ),
    Case(
        "a report without a split", [*trained("report=lr_search", verb="eval"), *trained("report=claims", verb="eval")]
    ),
    Case("a checkpoint that is not there", [*trained("checkpoint=none", verb="eval"), *trained("init_from=none")]),
    Case(
        "a folder that is not a checkpoint",
        [lambda place: place.line("eval", f"checkpoint={place.books}"), *trained("init_from=.", "seed=2")],
    ),
    Case("a checkpoint cut short", damaged("model.safetensors", *(cut(k / 10) for k in range(10)))),
    Case("a bit of the weights flipped", damaged("model.safetensors", *(flipped(k / 20) for k in range(21)))),
    Case("a bit of the description flipped", damaged("config.json", *(flipped(k / 20) for k in range(21)))),
    Case(
        "a damaged tokenizer",
        [*damaged("tokenizer.json", cut(0), cut(0.5)), *damaged("tokenizer.json", cut(0.5), verb="generate")],
    ),
    Case(
        "an invalid description of a model",
        [
            described(dims={}),
            described(dims={"d_model": "many"}),
            described(vocab_size=10**15),
            described(dims={"d_model": 0}),
            described(dims=[16], verb="train"),
            described(vocab_size="300"),
            described(model="local"),
            described(model={}),
            described(run_id=3),
            described(config=None),
            described(config={"model": "local"}),
            described(config={"model": {"name": "infini_linear"}, "task": {"name": "pg19"}, "dims": {}}),
            described(tokenizer_hash=None),
            described(tokenizer_hash=None, verb="generate"),
            described(tokenizer_hash=None, verb="train"),
            described(weights_sha256=None),
            described(weights_sha256=None, verb="generate"),
            nested_description,
        ],
    ),
    Case("a checkpoint of another model", named("eval", "checkpoint", "model=local")),
    Case("a checkpoint of other sizes", trained("dims.d_model=32", verb="eval")),
    Case("weights of other sizes to start from", named("train", "init_from", "dims.d_model=32")),
    Case("a checkpoint of another tokenizer", [other_tokenizer]),
    Case("a pickle that would run code", [hostile_weights, hostile_folder]),
    Case(
        "a damaged record",
        [damaged_record(b""), damaged_record(b"\x00\xff"), damaged_record(b"}"), changed_digit, nested_record],
    ),
    Case("a folder where a file is to be written", [in_the_way]),
    Case(
        "no space left",
        [
            full_disk_for_weights,
            *(full_disk("fsync", k) for k in range(1, 8)),
            *(full_disk("replace", k) for k in range(1, 6)),
            *(full_disk("fsync", k, "eval") for k in (1, 2, 3)),
            full_disk("replace", 1, "eval"),
            *(full_while_writing(name) for name in ("/.run.json", ".partial", "/.tokenizer.json")),
            full_while_writing("/runs/", "eval"),
        ],
    ),
    Case(
        "a limit on the size of files",
        [no_larger_files(20_000), no_larger_files(1_000), no_larger_files(1_000, "eval")],
    ),
    Case(
        "a results_dir that cannot be written",
        [
            *trained("results_dir=/proc/infini"),
            *trained("results_dir=/proc"),
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
        "a book that cannot be read",
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
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as undo:
        shutil.copytree(prepared, folder)
        patch.chdir(folder.parent)
        patch.setattr(records, "published_dir", lambda: folder / "published")
        yield Place(folder, patch, undo)


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
        # A training that found no room for its weights has its tokenizer there already, and uses it. One that
        # diverged is on record.
        new = {name for name in set(after) - set(before) if not _says_diverged(after[name])}
        assert {Path(name).name for name in new} <= {"tokenizer.json"}, wrong
        text = errors[0].removeprefix("infini: error: ").replace(str(made.folder), "DIR")
        answers.append(re.sub(r"\d{8}T\d{6}Z-train-[\w-]+|(?<=unfinished/)[\da-f-]+", "RUN", text))
    return answers


def _says_diverged(content: bytes) -> bool:
    try:
        return records.RunRecord.from_json(content.decode()).diverged is not None
    except ValueError:
        return False


def table(prepared: Path, folder: Path) -> str:
    answers = {case.name: try_out(case, prepared, folder / case.name.replace(" ", "_")) for case in CASES}
    rows = [f"| {name} | {len(said)} | `{said[0]}` |" for name, said in answers.items()]
    return "\n".join(
        [
            "# Bad input",
            "",
            f"Each case below was tried as often as the table says ({sum(map(len, answers.values()))} times in all)",
            "by `tests/cli/test_bad_input.py`: every time the answer was one line and exit code 2, without traceback,",
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
