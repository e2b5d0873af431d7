"""Decisions of docs/explanation/paper.md that are a default, a size or an absence: nothing else tests them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import make_model, one_in, variant_id, variants
from torch import nn

from infini.config.compose import compose, config_hash, config_identity
from infini.config.schema import Config
from infini.models import build_model, registered
from infini.nn.attention import FeedForward, InfiniAttention
from infini.nn.ops import memory
from infini.tasks.passkey.answers import Answer
from infini.tasks.text.hub import JSON_LINES

CONF = Path(__file__).parents[2] / "conf"


@cache
def composed(*overrides: str) -> Config:
    return compose(list(overrides))


@pytest.mark.parametrize(
    ("scale", "key", "expected"),
    [
        ("paper", "model.activation", "gelu"),
        ("paper", "model.tie_embeddings", True),
        ("paper", "scale.tokenizer", "google-t5/t5-base"),
        ("paper", "recipe.steps", 30_000),
        ("paper", "recipe.final_lr_fraction", 0.0),
        ("paper", "optimizer.weight_decay", 0.0),
        ("paper", "optimizer.clip_norm", None),
        ("gpu", "optimizer.name", "muon"),
        ("gpu", "recipe.steps", 1000),
        ("laptop", "optimizer.name", "muon"),
        ("laptop", "optimizer.weight_decay", 0.1),
        ("laptop", "optimizer.clip_norm", 1.0),
        ("laptop", "recipe.steps", 1200),
        ("laptop", "recipe.final_lr_fraction", 0.1),
        ("laptop", "recipe.batch_size", 5),
        ("laptop", "recipe.excerpt_tokens", 3840),
        ("laptop", "scale.vocab_size", 2048),
        ("laptop", "scale.eval_max_tokens", 65_536),
        ("gpu", "recipe.final_lr_fraction", 0.1),
        ("gpu", "recipe.batch_size", 32),
        ("gpu", "recipe.excerpt_tokens", 65_536),
        ("gpu", "scale.vocab_size", 16_384),
        ("gpu", "scale.eval_max_tokens", None),
        ("gpu", "optimizer.weight_decay", 0.1),
        ("gpu", "optimizer.clip_norm", 1.0),
    ],
)
def test_defaults_of_the_language_models(scale: str, key: str, expected: Any) -> None:
    value: Any = composed(f"scale={scale}")
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert value == expected


def test_defaults_of_the_passkey_task() -> None:
    cfg = composed("task=passkey", "recipe=passkey_laptop_finetune")
    assert cfg.task.digits == 5  # type: ignore[attr-defined]
    assert (cfg.recipe.steps, cfg.recipe.batch_size) == (400, 4)
    assert composed("task=passkey", "recipe=passkey_gpu_finetune", "scale=gpu").recipe.batch_size == 16
    assert cfg.optimizer.lr == composed("tuned=null").optimizer.lr, "the rate of the scale, not the paper's 0.0001"
    cfg = composed("task=passkey")
    assert cfg.task.few_digit_share == 0.8  # type: ignore[attr-defined]
    assert (cfg.recipe.short_sequences, cfg.recipe.final_lr_fraction) == ([5, 0.75], 0.05)
    assert (cfg.recipe.sparse_writes, cfg.recipe.sparse_loss_scale) == (0.03, 0.05)
    plain = composed("task=passkey", "recipe=passkey_laptop_plain").recipe
    assert (plain.sparse_writes, plain.short_sequences, plain.curriculum) == (None, None, [[128, 256], [128, 640]])


def test_presets_of_the_papers_models_have_their_own_rate_of_gates() -> None:
    for name, gate_lr in (("llm_1b_passkey", 0.01), ("llm_8b_booksum", 0.01), ("llm_as_in_paper", 0.0001)):
        optimizer = composed(f"experiment={name}").optimizer
        assert (optimizer.name, optimizer.lr, optimizer.gate_lr, optimizer.weight_decay) == ("adamw", 1e-4, gate_lr, 0)


def test_the_sweeps_8196_is_8192() -> None:
    rows = yaml.safe_load((CONF / "report" / "rmt_sweep.yaml").read_text())["models"]
    assert {title.split()[-1] for title in rows.values() if "sequences" in title} == {"4096", "8192", "32768"}


def test_parameters_at_the_papers_sizes() -> None:
    cfg = composed("scale=paper")
    with torch.device("meta"):
        model = build_model(cfg.model, cfg.dims, 32_100)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    # T5's biases: 12 layers, 32 buckets, 8 heads.
    biases = sum(size for name, size in sizes.items() if "bucket_bias" in name)
    assert biases == 12 * 32 * 8 == 3_072
    assert sum(size for name, size in sizes.items() if "embedding" not in name) == 151_020_640 + biases
    assert sum(sizes.values()) == 151_020_640 + biases + 32_100 * 1024 == 183_894_112


@pytest.mark.parametrize("options", variants(), ids=variant_id)
def test_no_dropout(options: dict[str, Any]) -> None:
    model = make_model(options)
    assert not [name for name, module in model.named_modules() if "dropout" in type(module).__name__.lower()]


def test_norms_stand_before_and_nothing_has_a_bias() -> None:
    model = make_model(next(options for options in variants() if options["name"] == "infini_linear"))
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    block = model.blocks[0]
    norms = {name: type(module) for name, module in model.named_modules() if "norm" in name}
    assert set(norms.values()) == {nn.LayerNorm}
    assert {name.rpartition(".")[2] for name in norms} == {"attention_norm", "feed_forward_norm", "norm"}
    # If the sublayers add nothing, a block returns its input: the norms are off the residual stream.
    with torch.no_grad():
        block.attention.o_proj.weight.zero_()
        block.feed_forward.down_proj.weight.zero_()
    seen = []
    hook = block.register_forward_hook(lambda _, inputs, outputs: seen.append((inputs[0], outputs[0])))
    model(torch.arange(8)[None])
    hook.remove()
    assert torch.equal(*seen[0])


@pytest.mark.parametrize(("name", "function"), [("gelu", nn.functional.gelu), ("relu", torch.relu)])
def test_the_feed_forward_layer_has_two_matrices_and_no_gate(name: Any, function: Any) -> None:
    layer, x = FeedForward(6, 10, name).double(), torch.randn(3, 6, dtype=torch.float64)
    assert len(list(layer.parameters())) == 2
    expected = function(x @ layer.up_proj.weight.T) @ layer.down_proj.weight.T
    assert (layer(x) - expected).abs().max() < 1e-12


def test_initial_weights_have_the_sizes_that_are_stated() -> None:
    cfg = composed("scale=laptop")
    torch.manual_seed(0)
    model = build_model(cfg.model, cfg.dims, 2048)
    residual = (2 * cfg.dims.n_layers) ** -0.5
    for name, weight in model.named_parameters():
        if weight.dim() != 2:
            continue
        expected = 0.02 if name == "embedding.weight" else weight.shape[1] ** -0.5
        expected *= residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        # The standard deviation of n draws is known to 1 / sqrt(2 n) of itself; five of these.
        assert weight.std().item() == pytest.approx(expected, rel=5 / (2 * weight.numel()) ** 0.5), name


@pytest.mark.parametrize(("n_heads", "on_memory"), [(8, [3, 7]), (4, [3]), (2, [1]), (1, [0]), (6, [1, 5])])
def test_every_fourth_specialised_gate_starts_on_the_memory(n_heads: int, on_memory: list[int]) -> None:
    beta = InfiniAttention(12, n_heads, 6, 8).beta
    assert beta.tolist() == [3.0 if head in on_memory else -3.0 for head in range(n_heads)]


def test_small_denominators_are_clamped_and_nothing_is_added() -> None:
    # One key dimension: sigma(q) z is their product. Below the bound it is the bound, above it untouched.
    z = torch.tensor([0.0, 1e-40, 1e-29, 1e-8, 1.0], dtype=torch.float64)
    found = memory.normaliser(torch.ones(5, 1, 1, 1, 1, dtype=torch.float64), z.view(5, 1, 1, 1)).flatten()
    assert torch.equal(found, torch.tensor([1e-30, 1e-30, 1e-29, 1e-8, 1.0], dtype=torch.float64))


def test_an_answer_is_compared_place_by_place() -> None:
    question = SimpleNamespace(prompt=SimpleNamespace(answer=np.array([1, 2, 3, 4, 5])))
    for given, right in (([1, 2, 3, 4, 5], 5), ([2, 3, 4, 5, 1], 0), ([1, 9, 3, 9, 5], 3), ([5, 4, 3, 2, 1], 1)):
        answer = Answer(question, np.array(given), 0.0, 0.0, 0.0, 0, 0, 0)  # type: ignore[arg-type]
        assert (answer.n_right, answer.n_tokens, answer.exact) == (right, 5, right == 5)


def test_a_hundred_documents_of_the_hubs_mathematics_are_tested() -> None:
    assert {source.most for source in JSON_LINES.values()} == {100}


@pytest.mark.parametrize("task", one_in(3, ["pg19", "arxiv_math", "booksum"]))
def test_all_models_of_a_table_have_the_same_positions(task: str) -> None:
    """Only the Compressive Transformer's are of its own paper: Transformer-XL's, learned too."""
    # A pretrained model's are its own.
    for name in sorted(set(registered("language_model")) - {"llm"}):
        with torch.device("meta"):
            cfg = composed(f"task={task}", f"model={name}")
            model = build_model(cfg.model, cfg.dims, 64)
        learned = "u" if name == "compressive" else "bucket_bias"
        biased = [block for block in model.blocks if hasattr(block.attention, learned)]
        assert len(biased) == len(model.blocks), name


def test_positions_are_the_tasks_and_an_option_that_is_new_changes_no_older_run() -> None:
    """Models that were trained before there was a choice had rotary positions."""
    text, key = composed(), composed("task=passkey")
    assert (text.model["positions"], key.model["positions"]) == ("t5", "rotary")
    assert config_hash(text) != config_hash(composed("task.positions=rotary")) != config_hash(key)
    assert config_hash(composed("model.positions=rotary")) == config_hash(composed("task.positions=rotary"))
    identity = config_identity(composed("task.positions=rotary"))
    assert "positions" not in identity["task"] and "positions" not in identity["model"]
    xl = [composed("model=transformer_xl", f"task.positions={kind}") for kind in ("t5", "rotary")]
    assert config_hash(xl[0]) == config_hash(xl[1])
