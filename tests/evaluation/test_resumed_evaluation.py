"""An evaluation of books that is stopped resumes after its last state, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from command_runner import Runner

from infini.cli import main as cli
from infini.evaluation import perplexity, result_cache, saved_reading
from infini.evaluation.result_cache import ResultCache
from infini.evaluation.saved_reading import Reading, SavedReadings
from infini.system import devices
from infini.tasks.text import document_evaluation


def counted_bars(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Of every progress bar of an evaluation its total and what it was advanced by, filled as evaluations run."""
    real_bar, bars = result_cache.progress_bar, list[list[float]]()

    @contextmanager
    def bar(title: str, total: float, *options: Any) -> Iterator[Callable[[float], None]]:
        bars.append([total])
        with real_bar(title, total, *options) as advance:

            def advancing(done: float) -> None:
                bars[-1].append(done)
                advance(done)

            advancing.skip = advance.skip  # type: ignore[attr-defined]
            yield advancing

    monkeypatch.setattr(result_cache, "progress_bar", bar)
    return bars


@pytest.mark.usefixtures("elsewhere", "clock")
@pytest.mark.parametrize("documents_per_batch", [1, 16])
def test_an_evaluation_stopped_in_every_pass_gives_the_same_record(
    with_model: Runner, monkeypatch: pytest.MonkeyPatch, documents_per_batch: int
) -> None:
    monkeypatch.setattr(perplexity, "DOCS_PER_BATCH", documents_per_batch)
    short_calls = "scale.eval_segments_per_call=8"
    with_model("eval", short_calls)
    (straight,) = with_model.records("eval")
    real_add, real_read = ResultCache.add, document_evaluation.stream_documents
    added: list[str] = []
    reads = 0

    def add(self: ResultCache, name: str, entry: dict[str, Any]) -> None:
        """Stops once before each entry is on disk."""
        if name not in added:
            added.append(name)
            raise KeyboardInterrupt
        real_add(self, name, entry)

    def read(*arguments: Any, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        return real_read(*arguments, **options)

    monkeypatch.setattr(ResultCache, "add", add)
    monkeypatch.setattr(document_evaluation, "stream_documents", read)
    batches = [0] if documents_per_batch == 16 else [0, 1, 2]
    passes = [*(f"read/{first}" for first in batches), "foreign"]
    passes += [f"{name}/{first}" for name in ("reset", "base") for first in batches]
    for _ in passes:
        with_model("eval", short_calls, code=cli.INTERRUPTED)
    with_model("eval", short_calls)
    assert added == passes
    assert reads == 2 * 3 * len(batches), "every batch is read twice: when it was stopped, and once more"
    resumed = with_model.records("eval")[-1]
    assert resumed.cost["resumed"] and not straight.cost["resumed"]
    assert resumed.results == straight.results and resumed.documents == straight.documents
    assert resumed.series == straight.series
    assert not list((with_model.results / "unfinished").glob("*"))


@pytest.mark.usefixtures("elsewhere", "clock")
@pytest.mark.parametrize(("model", "stops"), [("infini_linear", 6), ("rmt", 2)])
def test_documents_that_were_being_read_are_read_on_after_the_last_state(
    infini: Runner, monkeypatch: pytest.MonkeyPatch, model: str, stops: int
) -> None:
    """Stopped in both batches of each pass (three with knock-outs) after a state was saved: no number differs, and no
    token is read twice. Saving states changes nothing, either."""
    monkeypatch.setattr(perplexity, "DOCS_PER_BATCH", 2)
    words = (f"model={model}", "scale.eval_segments_per_call=2")
    infini("train", *words)
    infini("eval", *words)
    (straight,) = infini.records("eval")
    bars, real_save = counted_bars(monkeypatch), SavedReadings.save
    saves: list[tuple[str, int]] = []
    stop_at: list[tuple[str, int]] = []

    def save(self: SavedReadings, name: str, texts: list[str], reading: Reading) -> None:
        real_save(self, name, texts, reading)
        saves.append((texts[0], reading.tokens))
        if stop_at[:1] == saves[-1:]:
            stop_at.pop(0)
            raise KeyboardInterrupt

    monkeypatch.setattr(saved_reading, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(SavedReadings, "save", save)
    infini("eval", *words)
    whole, every = sum(bars[-1][1:]), list(saves)
    last = {name: at for at, (name, _) in enumerate(every)}
    first = {name: at for at, (name, _) in reversed(list(enumerate(every)))}
    stop_at += [every[at] for at in sorted((first[name] + last[name]) // 2 for name in first)]
    assert len(stop_at) == stops
    bars.clear()
    for _ in range(stops):
        infini("eval", *words, code=cli.INTERRUPTED)
    infini("eval", *words)
    assert not stop_at and sum(sum(bar[1:]) for bar in bars) == whole
    for run in infini.records("eval")[1:]:
        assert run.results == straight.results and run.documents == straight.documents
        assert run.series == straight.series
    assert infini.records("eval")[-1].cost["resumed"]
    assert not list((infini.results / "unfinished").glob("*"))


@pytest.mark.usefixtures("elsewhere", "clock")
@pytest.mark.parametrize("kept", [0, 2, 8])
def test_the_progress_of_what_resumes_counts_what_is_still_to_be_read(
    with_model: Runner, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """The time left is taken from the pace of this process, which results that were there before would raise."""
    monkeypatch.setattr(perplexity, "DOCS_PER_BATCH", 1)
    bars, real_add = counted_bars(monkeypatch), ResultCache.add
    added: list[str] = []

    def add(self: ResultCache, name: str, entry: dict[str, Any]) -> None:
        if len(added) == kept:
            raise KeyboardInterrupt
        added.append(name)
        real_add(self, name, entry)

    with monkeypatch.context() as patch:
        patch.setattr(ResultCache, "add", add)
        with_model("eval", code=cli.INTERRUPTED)
    with_model("eval")
    (stopped, resumed) = bars
    assert resumed[0] == sum(resumed[1:]) > 0
    if kept:
        assert resumed[0] < stopped[0]


@pytest.mark.usefixtures("elsewhere", "clock")
def test_results_of_a_machine_that_multiplies_in_another_format_are_not_taken(
    with_model: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """parallel.precision=auto is bfloat16 on some machines and float32 on others, which share a results folder."""
    auto = "parallel.precision=auto"
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda device: True)
    with_model("eval", auto)
    (in_bfloat16,) = with_model.records("eval")
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda device: False)
    real_add, added = ResultCache.add, list[str]()

    def add(self: ResultCache, name: str, entry: dict[str, Any]) -> None:
        if added:
            raise KeyboardInterrupt
        added.append(name)
        real_add(self, name, entry)

    with monkeypatch.context() as patch:
        patch.setattr(ResultCache, "add", add)
        with_model("eval", auto, code=cli.INTERRUPTED)
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda device: True)
    with_model("eval", auto)
    again = with_model.records("eval")[-1]
    assert again.results == in_bfloat16.results and not again.cost["resumed"]
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda device: False)
    with_model("eval", auto)
    assert with_model.records("eval")[-1].cost["resumed"], "what was measured in float32 still waits for its machine"
    assert with_model.records("eval")[-1].results != in_bfloat16.results
