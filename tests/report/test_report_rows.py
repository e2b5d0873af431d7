"""Rows with settings of their own: each is a configuration that can be trained, and is what its title says."""

from __future__ import annotations

import itertools
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infini.config.compose import compose
from infini.models import build_model
from infini.report.declared import declared_at, expected
from infini.report.load import load_report
from infini.report.text_report import Report
from infini.training.module import LanguageModelModule

SCALES = ("laptop", "gpu", "paper")


@cache
def report_named(name: str) -> Report:
    report = load_report(compose([f"report={name}"]).report)
    assert isinstance(report, Report)
    return report


def recipes(name: str, scale: str) -> dict[str, Any]:
    """Row -> key -> value of its sizes and recipe."""
    report = report_named(name)
    return {row: expected(report, row, scale, declared_at(report.task, scale)) for row in report.models}


def sequence(row: dict[str, Any]) -> int:
    """Tokens of a training sequence."""
    length: int = row["recipe.segments_per_sequence"] * row["dims.segment_length"]
    return length


@pytest.mark.parametrize("scale", SCALES)
def test_sequences_of_100k_are_longer_by_the_papers_ratio_and_none_is_cut(scale: str) -> None:
    """Excerpts of 3,840 tokens would end sequences of 1,200 after 2.4 times the usual length, not 3.125 times."""
    rows = recipes("table2_100k", scale)
    for usual, longer in (("infini_linear", "linear_100k"), ("infini_delta", "delta_100k")):
        assert sequence(rows[longer]) == 3.125 * sequence(rows[usual])
    assert len({row["recipe.excerpt_tokens"] for row in rows.values()}) == 1, "all rows read the same texts"
    excerpt = rows["local"]["recipe.excerpt_tokens"]
    assert (excerpt is None) == (scale == "paper")
    assert all(excerpt is None or excerpt % sequence(row) == 0 for row in rows.values())


REPORTS = ("table2_100k", "lm_gates", "lm_history_scaling", "rmt_sweep", "drawn_segments", "table2_decay")


@pytest.mark.parametrize(
    ("name", "scale"), [*itertools.product(REPORTS, SCALES), ("segment_lengths", "laptop"), ("memory_sizes", "laptop")]
)
def test_rows_of_a_report_are_trained_on_as_many_tokens_in_sequences_as_they_say(name: str, scale: str) -> None:
    rows = recipes(name, scale)
    tokens = {row: sequence(of) * of["recipe.batch_size"] * of["recipe.steps"] for row, of in rows.items()}
    assert len(set(tokens.values())) == 1, tokens
    for row, of in rows.items():
        settings = report_named(name).settings_of(row, scale)
        assert settings is not None, f"{row} is nowhere at scale {scale}"
        assert (f"variant={name}" in settings) == (row in report_named(name).variants)
        if (group := of["recipe.checkpoint_segments"]) is not None:
            assert of["recipe.segments_per_sequence"] % group == 0
        if (excerpt := of["recipe.excerpt_tokens"]) is not None:
            assert name == "rmt_sweep" or excerpt % sequence(of) == 0, f"{row}: sequences are cut"
        if name == "rmt_sweep" and row.startswith("rmt_"):
            vectors, length = row.split("_")[1:]
            # The paper's numbers are of segments of 2,048; a sequence of 32K has one segment less at laptop scale.
            segments = int(length.removesuffix("k")) // 2
            assert of["recipe.segments_per_sequence"] == (15 if (segments, scale) == (16, "laptop") else segments)
            by_scale = {"laptop": int(vectors) // 50, "gpu": int(vectors) * 512 // 2048, "paper": int(vectors)}
            assert of["model.memory_tokens"] == by_scale[scale]


@pytest.mark.parametrize(
    "row", ["linear_100k", "delta_100k", "linear_zeros", "linear_history", "rmt_50_4k", "rmt_150_32k"]
)
def test_a_row_can_be_trained(row: str) -> None:
    """One step of what `infini reproduce` would train at laptop scale, and the model at the paper's sizes."""
    report = next(found for found in map(report_named, REPORTS) if row in found.variants)
    settings = report.settings_of(row, "laptop")
    assert settings is not None
    cfg = compose([f"task={report.task}", f"model={report.model_of(row)}", *settings])
    assert cfg.variant == report.name
    torch.manual_seed(0)
    module = LanguageModelModule(build_model(cfg.model, cfg.dims, 64), cfg.optimizer, cfg.recipe, carry_state=True)
    shape = cfg.recipe.batch_size, cfg.recipe.segments_per_sequence * cfg.dims.segment_length
    ids = torch.randint(64, shape)
    mask, reset = torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    out = module._call({"ids_BT": ids, "mask_BT": mask, "reset_BT": reset}, None)
    loss = module._loss(out.hidden_BTD, ids)
    loss.backward()
    assert out.hidden_BTD.shape == (*shape, cfg.dims.d_model) and loss.isfinite()
    gradients = [parameter.grad for parameter in module.model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    at_paper = recipes(report.name, "paper")[row]
    options = {key.removeprefix("model."): value for key, value in at_paper.items() if key.startswith("model.")}
    dims = SimpleNamespace(**{key.removeprefix("dims."): v for key, v in at_paper.items() if key.startswith("dims.")})
    with torch.device("meta"):
        assert build_model(options, dims, 64).segment_length == 2048
