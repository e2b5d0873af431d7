"""Small made-up records of summaries, for the tests of their table, figure and claims."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from report_runs import make_train
from scipy import stats

from infini.records import RunRecord

BOOKS = ("one", "two", "three")
METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum", "overall")


def cell(length: int | None, values: Sequence[float]) -> dict[str, Any]:
    """Scores at a length, the same in every metric: one a book, and their mean."""
    scored = [{"name": name, **dict.fromkeys(METRICS[:-1], value)} for name, value in zip(BOOKS, values, strict=True)]
    mean = sum(values) / len(values)
    intervals = {f"{metric}_interval": [min(values), max(values)] for metric in METRICS}
    return {"length": length, **dict.fromkeys(METRICS, mean), **intervals, "books": scored}


def summaries(
    model: str,
    cells: Mapping[int, Sequence[float]],
    seed: int = 1,
    split: str = "test",
    name: str = "",
    trained: Mapping[str, Any] | None = None,
    asked: Mapping[str, Any] | None = None,
    **changes: Any,
) -> list[RunRecord]:
    """A training and its evaluation, with a score of each book at each length. trained, asked: dotted settings in which
    the configuration of either differs; changes: other fields of the evaluation."""
    options = {"unlimiformer": "none", "k": 8, "weights": None} if model in ("bart", "primera") else {}
    stem = f"{name}{model}-{seed}"
    config: dict[str, Any] = {
        "task": {"name": "booksum", "split": split, "references": "mean", "input_length": "500K"},
        "model": {"name": model, **options},
        "dims": {"segment_length": 16},
        "recipe": {"steps": 10},
        "seed": seed,
    }
    training = make_train(model, seed, run_id=f"train-{stem}", task="booksum", config=_changed(config, trained))
    data = {**training.data, "split": split, "revision": "beef" * 8}
    content: dict[str, Any] = {
        "run_id": f"eval-{stem}",
        "verb": "eval",
        "parent": training.run_id,
        "task": "booksum",
        "config": _changed(training.config, asked),
        "data": data,
        "series": {"cells": [cell(length, values) for length, values in cells.items()]},
    }
    return [training, make_train(model, seed, **{**content, **changes})]


def _changed(config: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
    made = copy.deepcopy(dict(config))
    for key, value in (settings or {}).items():
        group, _, last = key.partition(".")
        made[group] = {**made.get(group, {}), last: value} if last else value
    return made


def on_the_logit(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of the logit of a mean of scores in per cent, to first order."""
    mean = sum(values) / len(values)
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    at, scaled = np.log(mean / (100 - mean)), half * 100 / (mean * (100 - mean))
    low, high = (100 / (1 + np.exp(-(at + sign * scaled))) for sign in (-1, 1))
    return float(low), float(high)
