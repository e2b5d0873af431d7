"""An evaluation of books that is stopped in the middle of a reading goes on from there, to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_runner import Runner
from helpers import SEGMENT, VOCABULARY, PointsOnDisk, make_model, variant_id, variants

from infini.cli import main as cli
from infini.evaluation import result_cache as kept
from infini.evaluation.perplexity import Streamed, stream_documents, stream_with_foreign_memory
from infini.evaluation.result_cache import EvalCheckpoint, ResultCache

BOS = VOCABULARY - 1
LENGTHS = (37, 8, 1, 16, 21)
MODELS = pytest.mark.parametrize("options", variants(), ids=variant_id)


class Books:
    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.tokens = [rng.integers(BOS, size=length) for length in LENGTHS]
        self.n_tokens = np.array(LENGTHS)

    def ids(self, index: int) -> np.ndarray:
        return self.tokens[index]


def positions(points: PointsOnDisk) -> list[int]:
    return [int(tensors["position"]) for tensors in points.put_down]


def same(one: Streamed, other: Streamed) -> bool:
    pairs = ((one.by_position, other.by_position), (one.by_place, other.by_place))
    equal = [np.array_equal(a.nll, b.nll) and np.array_equal(a.tokens, b.tokens) for a, b in pairs]
    return all(equal) and one.growth == other.growth and all(a.edges == b.edges for a, b in pairs)


@MODELS
@pytest.mark.parametrize("reset_every", [None, SEGMENT])
def test_a_reading_goes_on_from_any_point(options: dict[str, Any], reset_every: int | None, tmp_path: Path) -> None:
    model, books, call = make_model(options, torch.float32), Books(), SEGMENT + 2
    straight = stream_documents(model, books, BOS, tokens_per_call=call, reset_every=reset_every)
    calls = -(-max(LENGTHS) // call)
    for stops in range(1, calls + 1):
        path = tmp_path / str(stops)
        seen: list[int] = []
        points = PointsOnDisk(path, stops)
        with pytest.raises(KeyboardInterrupt):
            stream_documents(model, books, BOS, tokens_per_call=call, reset_every=reset_every, points=points)
        going_on = PointsOnDisk(path, 0)
        found = stream_documents(
            model, books, BOS, tokens_per_call=call, reset_every=reset_every, points=going_on, advance=seen.append
        )
        assert same(found, straight)
        assert positions(points) + positions(going_on) == [call * (index + 1) for index in range(calls)]
        assert sum(seen) == sum(LENGTHS), "the bar ends where it would have ended"


@MODELS
def test_a_reading_with_foreign_memory_goes_on_from_any_point(options: dict[str, Any], tmp_path: Path) -> None:
    model, books = make_model(options, torch.float32), Books()
    straight = stream_with_foreign_memory(model, books, BOS)
    calls = -(-sorted(LENGTHS)[-2] // model.segment_length)
    for stops in range(1, calls + 1):
        path = tmp_path / str(stops)
        seen: list[int] = []
        points = PointsOnDisk(path, stops)
        with pytest.raises(KeyboardInterrupt):
            stream_with_foreign_memory(model, books, BOS, points=points)
        going_on = PointsOnDisk(path, 0)
        found = stream_with_foreign_memory(model, books, BOS, points=going_on, advance=seen.append)
        assert all(map(same, found, straight))
        assert len(points.put_down + going_on.put_down) == calls
        assert sum(seen) == straight[0].tokens.sum()


@pytest.fixture
def entries(tmp_path: Path) -> ResultCache:
    return ResultCache(tmp_path / "task.jsonl", [])


def test_a_point_is_of_one_entry_and_one_commit(entries: ResultCache, capsys: pytest.CaptureFixture[str]) -> None:
    point = EvalCheckpoint(entries, "read/0")
    assert point.found() is None and not entries.begun
    point.put({"x": torch.arange(3)})
    again = EvalCheckpoint(entries, "read/0")
    assert torch.equal(again.found()["x"], torch.arange(3))  # type: ignore[index]
    assert again.seconds > again.before > 0 and entries.begun
    assert EvalCheckpoint(entries, "read/16").found() is None
    assert capsys.readouterr().err == ""
    entries.commit = ["another", False]
    assert EvalCheckpoint(entries, "read/0").found() is None
    assert "of another commit; it is read from its start again" in capsys.readouterr().err
    again.drop()
    assert not entries.begun


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_point_is_said_and_left(
    entries: ResultCache, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    EvalCheckpoint(entries, "read/0").put({"x": torch.arange(300)})
    whole = entries.point_path.read_bytes()
    spoilt = {"flipped": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "cut": whole[:-9], "empty": b""}
    entries.point_path.write_bytes(spoilt[damage])
    point = EvalCheckpoint(entries, "read/0")
    assert point.found() is None and point.before == 0
    assert "task.safetensors: " in (said := capsys.readouterr().err) and "Traceback" not in said


def test_points_take_a_small_share_of_the_time(entries: ResultCache, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(kept.time, "perf_counter", lambda: now)
    point = EvalCheckpoint(entries, "read/0")
    for takes, pause in ((0.5, kept.POINT_SECONDS), (3.0, 3.0 / kept.WRITE_SHARE)):

        def writing(*arguments: Any, takes: float = takes) -> None:
            nonlocal now
            now += takes

        monkeypatch.setattr(kept, "write_tensors", writing)
        now += 1000
        assert point.due()
        point.put({})
        now += pause - 0.01
        assert not point.due()
        now += 0.02
        assert point.due()


@pytest.mark.usefixtures("elsewhere", "clock")
def test_an_evaluation_stopped_in_every_pass_gives_the_same_record(
    with_model: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_calls = "scale.eval_segments_per_call=8"
    with_model("eval", short_calls)
    (straight,) = with_model.records("eval")
    monkeypatch.setattr(kept, "POINT_SECONDS", -1.0)
    monkeypatch.setattr(kept, "WRITE_SHARE", 1e9)
    real = EvalCheckpoint.put
    points: list[str] = []

    def putting(self: EvalCheckpoint, tensors: dict[str, torch.Tensor]) -> None:
        real(self, tensors)
        points.append(self.about["name"])
        if points.count(points[-1]) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(EvalCheckpoint, "put", putting)
    for _ in range(4):
        with_model("eval", short_calls, code=cli.INTERRUPTED)
    with_model("eval", short_calls)
    assert list(dict.fromkeys(points)) == ["read/0", "foreign", "reset/0", "base/0"]
    resumed = with_model.records("eval")[-1]
    assert resumed.cost["resumed"] and not straight.cost["resumed"]
    assert resumed.results == straight.results and resumed.documents == straight.documents
    assert resumed.series == straight.series
    assert not list((with_model.results / "unfinished").glob("*"))
