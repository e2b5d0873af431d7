"""Parts of an evaluation are jobs of their own, and give exactly the record of one that was not divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from books import write_books
from command_runner import Runner, read_by
from tiny_runs import SUMMARIES

from infini import records
from infini.cli import main as cli
from infini.evaluation import perplexity
from infini.evaluation.result_cache import ResultCache
from infini.records import RunRecord

PARTS = ["part=3/4", "part=1/4", "part=4/4", "part=2/4"]
PROMPTS = ["dims.segment_length=32", "recipe.segments_per_sequence=8", "recipe.curriculum=null", "task.examples=3"]
WORDS = {
    "pg19": ["task=pg19", "scale.eval_segments_per_call=8"],
    "passkey": ["task=passkey", *PROMPTS, "length=256,300", "depth=start,end"],
    "booksum": ["task=booksum", *SUMMARIES, "length=64,128"],
}

pytestmark = pytest.mark.usefixtures("elsewhere", "clock")


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The results that are measured, in order."""
    found: list[str] = []
    real = ResultCache.add

    def add(self: ResultCache, name: str, entry: dict[str, Any]) -> None:
        real(self, name, entry)
        found.append(name)

    monkeypatch.setattr(ResultCache, "add", add)
    # Three documents make four passes, three of them in three batches.
    monkeypatch.setattr(perplexity, "DOCS_PER_BATCH", 1)
    return found


@pytest.fixture
def words(request: pytest.FixtureRequest, infini: Runner, tmp_path: Path) -> list[str]:
    """An evaluation of a model that was trained for this task, by name; pg19 where none is given."""
    task = getattr(request, "param", "pg19")
    data = [f"task.data_dir={write_books(tmp_path / 'books')}"] if task == "booksum" else []
    asked = [*WORDS[task], *data]
    infini("train", *read_by(["train"], asked))
    return asked


def numbers(run: RunRecord) -> tuple[Any, ...]:
    """The numbers of a record, without the seconds and bytes of the run."""
    timed = ("seconds", "tokens_per_second", "generator_share", "peak_memory_bytes")
    cells = [{key: value for key, value in cell.items() if key not in timed} for cell in run.series.get("cells", ())]
    return run.results, run.documents, run.series | {"cells": cells}, run.data.keys(), run.cost["tokens_seen"]


@pytest.mark.parametrize("words", WORDS, indirect=True)
def test_parts_merge_to_the_numbers_of_one_evaluation(infini: Runner, words: list[str], added: list[str]) -> None:
    infini("eval", *words)
    (straight,) = infini.records("eval")
    whole = sorted(added)
    added.clear()
    for part in PARTS:
        infini("eval", *words, part)
        assert f"{part}: done; {len(added)} of {len(whole)} results are in the cache" in infini.out
        assert not infini.records("eval")[1:] and "record:" not in infini.out
    assert sorted(added) == whole, "each is measured once"
    added.clear()
    infini("eval", *words)
    merged = infini.records("eval")[-1]
    assert added == [] and merged.cost["resumed"] and "machines" not in merged.environment
    assert numbers(merged) == numbers(straight)
    assert not list((infini.results / "unfinished").glob("*"))


def test_what_is_missing_is_measured_when_parts_are_merged(infini: Runner, words: list[str], added: list[str]) -> None:
    infini("eval", *words)
    (straight,) = infini.records("eval")
    whole, shares = sorted(added), []
    for part in ("part=1/3", "part=3/3"):
        added.clear()
        infini("eval", *words, part)
        shares.append(list(added))
        added.clear()
        infini("eval", *words, part)
        assert added == [], "a part that is asked again is not measured again"
    # Other parts leave out entries that exist already.
    infini("eval", *words, "part=1/2")
    shares.append(list(added))
    added.clear()
    infini("eval", *words)
    assert all(shares) and added and sorted(name for share in (*shares, added) for name in share) == whole
    assert numbers(infini.records("eval")[-1]) == numbers(straight)


@pytest.mark.parametrize("words", ["passkey"], indirect=True)
def test_parts_merge_whatever_has_no_effect(infini: Runner, words: list[str], added: list[str], tmp_path: Path) -> None:
    """Nodes may name a folder differently that prompts of the paper's filler do not read."""
    infini("eval", *words, "part=1/2", f"task.data_dir={tmp_path}")
    infini("eval", *words, "part=2/2")
    added.clear()
    infini("eval", *words)
    assert added == []


def test_a_part_that_was_stopped_resumes(
    infini: Runner, words: list[str], added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: ResultCache, name: str, entry: dict[str, Any]) -> None:
        real(self, name, entry)
        if len(added) == 2:
            raise KeyboardInterrupt

    real = ResultCache.add
    with monkeypatch.context() as patch:
        patch.setattr(ResultCache, "add", stopped)
        infini("eval", *words, "part=1/2", code=cli.INTERRUPTED)
    infini("eval", *words, "part=1/2")
    assert len(added) == len(set(added)) == 5


def test_parts_run_at_once_and_nothing_beside_the_whole(infini: Runner, words: list[str], added: list[str]) -> None:
    infini("eval", *words, "part=1/2")
    (first,) = (infini.results / "unfinished").glob("*.1of2.jsonl")
    whole = first.with_name(first.name.replace(".1of2", ""))
    with ResultCache(whole, (), part=(1, 2)):
        infini("eval", *words, "part=2/2")
        busy = "another evaluation of this model is writing it; wait until that has ended"
        assert infini.error("eval", *words, "part=1/2") == f"{first}: {busy}"
        assert infini.error("eval", *words) == f"{whole}: {busy}"
    with ResultCache(whole, ()):
        assert infini.error("eval", *words, "part=1/2") == f"{whole}: {busy}"
    infini("eval", *words)
    assert len(infini.records("eval")) == 1


def test_parts_are_the_jobs_of_a_sweep(infini: Runner, words: list[str], added: list[str]) -> None:
    infini("eval", "-m", *words, "part=1/3,2/3,3/3")
    assert len(added) == 10 and not infini.records("eval")
    infini("eval", *words)
    assert len(added) == 10 and len(infini.records("eval")) == 1


def test_a_record_names_the_machines_of_its_parts(
    infini: Runner, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, machine in enumerate(("one", "other"), 1):
        monkeypatch.setattr(records, "_hardware", lambda machine=machine: {"cpu": machine, "accelerator": None})
        infini("eval", *words, f"part={number}/2")
    infini("eval", *words)
    (run,) = infini.records("eval")
    assert sorted(run.environment["machines"]) == ["one", "other"]


def test_results_that_another_evaluation_adds_to_stay(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultCache(path, ()) as whole:
        whole.add("a", {})
    with ResultCache(path, (), part=(1, 1)) as part:
        whole.drop(["a"])
        part.add("b", {})
    assert set(ResultCache(path, ()).entries) == {"a", "b"}
    whole.drop(["a"])
    assert set(ResultCache(path, ()).entries) == {"b"} and list(tmp_path.iterdir()) == [path]


def test_what_killed_evaluations_left_is_removed(tmp_path: Path) -> None:
    killed, other = (tmp_path / f".{name}.jsonl.0a1b2c3d.tmp" for name in ("results", "results2"))
    for path in (killed, other):
        path.write_text("{")
    with ResultCache(tmp_path / "results.jsonl", ()):
        assert not killed.exists() and other.exists()


@pytest.mark.parametrize("part", ["5/4", "0/4", "x", "1/4/4", "2", "1/0", "-1/4", "[1,2]", "1.5", "true", "1/9999999"])
def test_a_part_that_is_none_is_refused(infini: Runner, part: str) -> None:
    said = infini.error("eval", f"part={part}")
    assert said.startswith(("part=", "part: ")) and "must be" in said


def test_a_reference_has_no_parts(infini: Runner) -> None:
    said = infini.error("eval", "task=booksum", "task.reference=lead", "part=1/2")
    assert said.startswith("part: task.reference=lead evaluates no model")
