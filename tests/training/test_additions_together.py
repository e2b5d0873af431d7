"""Every two settings of a recipe together, on every task: a training of finite loss, or one line that says why not."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from helpers import one_in
from tiny_runs import TINY, write_corpus

from infini.config.compose import compose
from infini.config.schema import Config, RecipeConfig
from infini.errors import InputError
from infini.models import build_model
from infini.training.module import LanguageModelModule

SETTINGS: dict[str, dict[str, Any]] = {
    "excerpt_tokens": {"excerpt_tokens": 50},
    "checkpoint_activations": {"checkpoint_activations": True},
    "checkpoint_segments": {"checkpoint_segments": 1},
    "loss_chunk": {"loss_chunk": 7},
    "curriculum": {"curriculum": None},
    "length_extension": {"length_extension": 1000.0, "length_extension_share": 1.0},
    "long_history": {"length_extension": 1000.0, "length_extension_share": 0.5, "long_history": [2, 20]},
    "short_sequences": {"short_sequences": [4, 0.5]},
    "sparse_writes": {"sparse_writes": 0.01},
    "sparse_loss_scale": {"sparse_writes": 0.01, "sparse_loss_scale": 100.0},
}
NUMBERS = ("name", "batch_size", "segments_per_sequence", "steps", "warmup_steps", "schedule", "final_lr_fraction")
"""Fields of a recipe that change no step's computation but by a number; and save_every, which changes none."""
PART_OF = {"advance_below": "curriculum", "length_extension_share": "length_extension"}
STAGES = {"pg19": [[16, 16, 1]], "passkey": [[32, 192, 1]], "booksum": [[16, 32, 1]]}
"""Stages of one step, so that the second step is one of the training proper."""
REFUSED = {
    ("pg19", "long_history"): "recipe.long_history=.*: must be null for task=pg19",
    ("pg19", "short_sequences"): "recipe.short_sequences=.*: must be null for task=pg19",
    ("booksum", "short_sequences"): "recipe.short_sequences=.*: must be null for task=booksum",
    ("booksum", "long_history"): "recipe.long_history=.*: must be null for task=booksum",
    ("booksum", "curriculum"): "recipe.curriculum=.*: booksum has no stages",
}
PAIRS = [*((name,) for name in SETTINGS), *combinations(SETTINGS, 2)]
DECIDE_DATA = ("excerpt_tokens", "curriculum", "long_history", "short_sequences")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Task -> a configuration with none of the settings."""
    corpus, cache = write_corpus(tmp_path_factory.mktemp("corpus")), tmp_path_factory.mktemp("cache")
    own = {
        "pg19": [f"task.data_dir={corpus}", "recipe.segments_per_sequence=5"],
        "passkey": ["dims.segment_length=32", "recipe.segments_per_sequence=8"],
        "booksum": ["task.data_dir=synthetic", "recipe.segments_per_sequence=5", "task.summary_tokens=20"],
    }
    none = ["recipe.curriculum=null", "recipe.long_history=null", "recipe.length_extension=null"]
    none += [
        "recipe.sparse_writes=null",
        "recipe.sparse_loss_scale=null",
        "recipe.excerpt_tokens=null",
        "recipe.short_sequences=null",
    ]
    words = [*TINY, *none, "recipe.steps=2", "model=infini_delta", f"cache_dir={cache}"]
    return {task: compose([*words, f"task={task}", *own[task]]) for task in STAGES}


@pytest.fixture(scope="module")
def opened() -> dict[Any, Any]:
    """Data modules that are set up, by what decides them."""
    return {}


def steps(cfg: Config, data: Any) -> list[torch.Tensor]:
    """Losses of the recipe's steps, with their gradients made."""
    torch.manual_seed(0)
    model = build_model(cfg.model, cfg.dims, data.tokenizer.vocab_size)
    model.checkpoint_activations = cfg.recipe.checkpoint_activations
    module = LanguageModelModule(model.train(), cfg.optimizer, cfg.recipe, cfg.task.carry_state, cfg.seed)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    losses = []
    for number, given in zip(range(cfg.recipe.steps), data.train_dataloader(), strict=False):
        batch: Any = data.batches.batch(given, module.stage) if cfg.task.name == "passkey" else given
        loss = module.training_step(batch, number)
        loss.backward()
        losses.append(loss.detach())
    assert any(weights.grad is not None for weights in model.parameters())
    return losses


def test_every_setting_of_a_recipe_is_tried() -> None:
    assert set(RecipeConfig.__dataclass_fields__) == {*SETTINGS, *NUMBERS, *PART_OF, "save_every"}


@pytest.mark.parametrize(
    ("task", "names"), one_in(3, product(STAGES, PAIRS), lambda task, names: f"{task}-{'+'.join(names)}")
)
def test_two_settings_of_a_recipe_go_together(
    task: str, names: tuple[str, ...], bases: dict[str, Config], opened: dict[Any, Any]
) -> None:
    changes: dict[str, Any] = {}
    for name in names:
        changes |= SETTINGS[name]
    if "curriculum" in names:
        changes["curriculum"] = STAGES[task]
    key = task, *(name for name in names if name in DECIDE_DATA)

    def trained() -> list[torch.Tensor]:
        cfg = replace(bases[task], recipe=replace(bases[task].recipe, **changes))
        if key not in opened:
            data = importlib.import_module(f"infini.tasks.{task}.task").DataModule(cfg)
            data.setup("fit")
            opened[key] = data
        return steps(cfg, opened[key])

    refused = [REFUSED[task, name] for name in names if (task, name) in REFUSED]
    if refused:
        with pytest.raises(InputError, match="|".join(refused)):
            trained()
        return
    losses = trained()
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
