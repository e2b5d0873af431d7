"""Every command of the README runs, in the order in which a reader could type them, with tiny models and texts.

The commands are read from the page, so that a new one has to be added here. The settings that make a command small
replace the setting of the same key, or are added to it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
from books import write_books
from command_runner import read_by
from test_readme import README, ROOT, commands_of
from tiny_runs import SUMMARIES, TINY, write_corpus

from infini import records
from infini.cli import main as cli
from infini.config.schema import key_of

PASSKEY = (
    *("dims.segment_length=32", "recipe.segments_per_sequence=8", "recipe.curriculum=null", "recipe.long_history=null"),
    "recipe.length_extension_share=0.5",
)
ROWS = "model=local,infini_linear"
OF_A_BASE = tuple(text for text in TINY if not text.startswith(("dims.", "scale.")))
"""Its sizes and its vocabulary are the base's."""
SMALL: dict[str, tuple[str, ...]] = {
    "train --help": (),
    "demo key=12345 place=0.1": ("length=16K",),
    "demo key=12345 length=4M place=0.1": ("length=32K",),
    "train task=pg19 model=infini_linear": TINY,
    "train task=pg19 task.data_dir=my_books": TINY,
    "eval task=pg19 model=infini_linear": TINY,
    "eval part=1/4": TINY,
    "generate prompt=@book.txt decoding.temperature=0": ("decoding.max_new_tokens=4",),
    "table report=table2_lm": (),
    "figure report=table2_lm": (),
    "train task=passkey": (*TINY, *PASSKEY),
    "train task=passkey recipe=passkey_laptop_extended": (*TINY, *PASSKEY),
    "eval task=passkey length=1M task.examples=2": (*TINY, *PASSKEY, "length=1K"),
    "eval task=passkey length=32K,1M depth=start,0.25,end": (*TINY, *PASSKEY, "length=512,1K", "task.examples=1"),
    "train logger=wandb": (*TINY, "seed=2"),
    "train -m model=infini_linear,infini_delta seed=1,2,3": (*TINY, "seed=3,4"),
    "train -m hydra/launcher=submitit_local seed=1,2": (*TINY, "seed=5,6"),
    "train parallel=ddp parallel.devices=2 recipe.batch_size=6": (*TINY, "recipe.batch_size=2", "seed=7"),
    "train task=pg19 model=llm model.base=qwen-infini model.train=lora optimizer=adamw optimizer.lr=3e-4 "
    "recipe.batch_size=1 recipe.segments_per_sequence=4 recipe.steps=100": (
        *OF_A_BASE,
        "model.base={base}",
        "dims.segment_length=16",
    ),
    "inject base=Qwen/Qwen3-0.6B out=qwen-infini": ("base={base}",),
    "inject checkpoint=RUN_ID out=my-model": ("checkpoint={llm}",),
    "bench suite=train": (*TINY, "suite.repeats=1", "suite.stream_short_tokens=64", "suite.stream_tokens=256"),
    "reproduce report=table2_lm seed=1,2,3": (*TINY, ROWS),
    # Rows with steps and lengths of their own, which nothing makes small.
    "reproduce report=table2_100k seed=1,2,3": ("plan=true",),
    "reproduce experiment=rmt_sweep": ("plan=true",),
    "reproduce -m workers=4 hydra/launcher=joblib": (*TINY, "report=table2_lm", ROWS, "workers=2", "seed=8"),
    "reproduce report=table3_passkey report.run=all": (
        *TINY,
        *PASSKEY,
        "report.run=linear",
        "length=512",
        "task.examples=1",
    ),
    "reproduce report=table4_booksum seed=1,2,3": (*SUMMARIES, "report.run=infini_linear"),
    "reproduce report=booksum_lengths seed=1,2,3": (
        *SUMMARIES,
        "report.run=infini_linear",
        "report.input_lengths=[64,128]",
    ),
    "summarize book.txt output=summary.txt": ("decoding.max_new_tokens=4",),
    "table report=table1_memory": (),
    "table report=claims": (),
    "publish report=table2_lm": ("report.aggregate=newest",),
}
"""Command as the README, or the page of the tables' times, has it -> settings that make it small."""


def test_every_command_of_the_readme_is_run() -> None:
    tables = (ROOT / "docs" / "explanation" / "provenance.md").read_text(encoding="utf-8")
    named = {command for command in commands_of(tables) if "=" in command}
    assert set(SMALL) == commands_of(README) | named


def made_small(command: str, names: Mapping[str, str]) -> list[str]:
    """The words of the command line."""
    own = shlex.split(command)
    settings = {key_of(text): text.format(**names) if "{" in text else text for text in SMALL[command]}
    kept = [word for word in own if not key_of(word) or key_of(word) not in settings]
    if "--help" in own:
        return own
    shared = [*settings.values(), "logger=none", "results_dir=results"]
    keys = {key_of(word) for word in kept}
    added = [text for text in read_by([*kept, *settings.values()], shared) if key_of(text) not in keys]
    # read_by knows no keys of launchers and lists of models.
    return [*kept, *dict.fromkeys([*added, *(text for text in settings.values() if key_of(text) in ("model", "seed"))])]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("elsewhere", "offline_wandb")
def test_the_commands_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_books(tmp_path / "data").parent
    write_corpus(data / "pg19")
    write_corpus(data / "arxiv_math")
    write_corpus(tmp_path / "my_books")
    (tmp_path / "book.txt").write_text("A man goes. A dog runs. " * 20, encoding="utf-8")
    monkeypatch.setenv("INFINI_DATA_DIR", str(data))
    for package in ("transformers", "hydra_plugins.hydra_submitit_launcher", "hydra_plugins.hydra_joblib_launcher"):
        pytest.importorskip(package)
    from tiny_llms import write_tiny_base

    names = {"base": str(write_tiny_base(tmp_path / "base"))}
    for command in SMALL:
        words = made_small(command, names)
        code = cli.main(words)
        said = capfd.readouterr()
        if command.startswith("publish") and code:
            # The checkout has changes that are not committed.
            assert "uncommitted changes" in said.err, said.err
            continue
        assert code == 0, f"infini {shlex.join(words)}: {said.err[-2000:]}"
        if command.startswith("train task=pg19 model=llm"):
            names["llm"] = max(records.load_records(tmp_path / "results"), key=lambda run: run.started).run_id
    assert (tmp_path / "summary.txt").read_text(encoding="utf-8")
