"""Encoder-decoders that start from others' weights: their mode, type, marks, windows and positions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from books import write_books
from command_runner import Runner
from test_seq2seq import MARK, MODELS, VOCABULARY, WINDOW, make, tokens
from tiny_runs import SUMMARIES

from infini.config.compose import compose
from infini.errors import InputError
from infini.models import build_model
from infini.pretrained.seq2seq import FILL, SourceReader
from infini.report.load import load_report
from infini.report.summaries import SummaryReport

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """A model's name, and a folder of weights that are stored in half precision and say that they drop out."""
    made = make(request.param)
    made.inner.config.dropout = 0.5
    made.inner.half().save_pretrained(tmp_path)
    return request.param, str(tmp_path)


def built(name: str, weights: str | None, **options: Any) -> Any:
    """The model as a training builds it."""
    sizes = SimpleNamespace(d_model=16, n_layers=2, n_heads=2, d_ff=24, segment_length=8)
    given = {"name": name, "weights": weights, "window": WINDOW, "unlimiformer": "none", "k": 8, "search": "exact"}
    return build_model({**given, **options}, sizes, VOCABULARY)


def test_trained_weights_are_trained_on_in_float32(saved: tuple[str, str]) -> None:
    model = built(*saved)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(module.training for module in model.modules())
    ids, source = tokens(1, 6), tokens(1, 10, 2)
    calls = [model(ids, source_BS=source, source_mask_BS=torch.ones_like(source)).hidden_BTD for _ in range(2)]
    assert not torch.equal(*calls), "dropout is on"


def test_a_source_stands_between_the_marks_that_the_weights_know(saved: tuple[str, str]) -> None:
    model = built(*saved).eval()
    seen: list[dict[str, Any]] = []
    model.inner.get_encoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    source, mask = tokens(2, WINDOW + 3, 2), torch.ones(2, WINDOW + 3).bool()
    mask[1, 5:] = False
    model(tokens(2, 4), source_BS=source, source_mask_BS=mask)
    begin, end = model.inner.config.bos_token_id, model.inner.config.eos_token_id
    ids, told = seen[0]["input_ids"], seen[0]["attention_mask"]
    assert begin != end and ids.shape == told.shape == (2, WINDOW)
    assert ids[0].tolist() == [begin, *source[0, : WINDOW - 2].tolist(), end] and told[0].all()
    assert ids[1, :7].tolist() == [begin, *source[1, :5].tolist(), end]
    assert told[1].tolist() == [1] * 7 + [0] * (WINDOW - 7)
    # The same where it is summed up.
    SourceReader.begin(model, source[0].numpy(), MARK)
    assert torch.equal(seen[1]["input_ids"], ids[:1])


@pytest.mark.parametrize("name", MODELS)
def test_a_test_of_long_sources_leaves_the_training_as_it_is(name: str) -> None:
    """Fewer states than the window has, and a source longer than it: neither counts in training."""
    found = []
    for how in ("none", "test"):
        model = make(name, how, k=3).train()
        source = tokens(2, WINDOW + 9, 2)
        hidden = model(tokens(2, 7), source_BS=source, source_mask_BS=torch.ones_like(source)).hidden_BTD
        model.head(hidden).square().sum().backward()
        found.append((hidden, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        assert model.source_tokens(WINDOW + 9) == WINDOW
    (hidden, grads), (other_hidden, other_grads) = found
    assert torch.equal(hidden, other_hidden) and grads.keys() == other_grads.keys() and len(grads) > 20
    assert all(torch.equal(grads[key], other_grads[key]) for key in grads)
    # Both count in an evaluation.
    model.eval()
    read = model(tokens(2, 7), source_BS=source, source_mask_BS=torch.ones_like(source)).hidden_BTD
    assert model.source_tokens(WINDOW + 9) == WINDOW + 9 and (read - hidden).abs().max() > 1e-6


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["none", "alternating"])
@pytest.mark.parametrize("search", ["exact", "approximate"])
def test_windows_that_are_padding_throughout_leave_no_trace(name: str, how: str, search: str) -> None:
    """A short book beside one of several windows: finite states, gradients, and what it gives alone."""
    model = make(name, how, k=6)
    if search == "approximate":
        pytest.importorskip("faiss")
        model = make(name, how, k=6, search=search)
    model.train()
    source, ids = tokens(2, 5 * WINDOW, 2), tokens(2, 7)
    mask = torch.ones_like(source).bool()
    mask[1, 4:] = False
    hidden = model(ids, source_BS=source, source_mask_BS=mask).hidden_BTD
    model.head(hidden).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    alone = model(ids[1:], source_BS=source[1:, :4], source_mask_BS=mask[1:, :4]).hidden_BTD
    assert (hidden[1] - alone[0]).abs().max() < 1e-10


def test_a_window_that_is_filled_up_beyond_its_positions_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model.window=700: must be a multiple of 512, over which a token attends"):
        built("primera", None, window=700)
    model = built("primera", None, window=1024).eval()
    source = tokens(1, 700)
    assert model.encode_source(source).shape == (1, 700, 16)
    # Weights with positions left over are filled up to these.
    wide = built("primera", None, window=1024)
    wide.inner.save_pretrained(tmp_path)
    narrow = built("primera", str(tmp_path), window=700).eval()
    assert narrow.encode_source(source).shape == (1, 700, 16)


@pytest.mark.parametrize("name", MODELS)
def test_every_tokens_embedding_is_trained(name: str) -> None:
    """The fill token's embedding is trained, too: T5's vocabulary has the end of a text there."""
    model = built(name, None)
    ids = torch.tensor([[0, FILL, 5]])
    model(ids, source_BS=ids, source_mask_BS=torch.ones_like(ids)).hidden_BTD.square().sum().backward()
    grad = model.inner.get_input_embeddings().weight.grad
    assert (grad[[0, FILL, 5]].abs().sum(-1) > 0).all() and not grad[6:].any()


def test_a_summary_that_has_no_positions_is_refused_before_the_training(infini: Runner, tmp_path: Path) -> None:
    words = ["task=booksum", *SUMMARIES, "model=bart", "model.window=16", f"task.data_dir={write_books(tmp_path)}"]
    message = infini.error("train", *words, "task.summary_tokens=3000")
    assert message == "task.summary_tokens=3000: must be at most 2047, which the decoder has positions for"


def test_the_papers_scale_starts_from_the_hubs_weights_at_the_papers_rate() -> None:
    report = load_report(compose(["report=table4_booksum"]).report)
    assert isinstance(report, SummaryReport)
    for name, weights in (("bart", "facebook/bart-base"), ("primera", "allenai/PRIMERA")):
        for row, how in ((name, "none"), (f"{name}_unlimiformer", "alternating")):
            settings = report.systems[row].settings_at("paper")
            cfg: Any = compose(["task=booksum", "scale=paper", f"model={name}", *settings])
            assert (cfg.model["weights"], cfg.model["unlimiformer"], cfg.optimizer.lr) == (weights, how, 1e-4)
            # Their decoders have positions for 1,024 tokens, of which two are marks.
            assert cfg.task.summary_tokens == cfg.decoding.max_new_tokens == 1022
            laptop: Any = compose(["task=booksum", f"model={name}", *report.systems[row].settings_at("laptop")])
            assert laptop.model["weights"] is None and laptop.task.summary_tokens == 1024
    cfg = compose(["task=booksum", "scale=paper"])
    assert (cfg.optimizer.name, cfg.optimizer.lr, cfg.optimizer.gate_lr) == ("adafactor", 1e-4, 0.01)
    assert compose(["scale=paper"]).optimizer.lr == 0.01
