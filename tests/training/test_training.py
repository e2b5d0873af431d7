"""The training module: schedule, losses, carried state, stopping and going on."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from device_reads import training_batch
from helpers import VOCABULARY, assert_on, make_model, tiny_dims, variant_id, variants, with_memory
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file
from tiny_runs import TINY, write_corpus
from torch.utils.data import DataLoader

from infini.config.compose import compose
from infini.config.schema import Config, groups
from infini.errors import InputError
from infini.models import build_model, registered
from infini.nn.ops import memory
from infini.nn.state import leaves
from infini.records import RunRecord, load_records
from infini.runs import train as train_command
from infini.tasks.text.document_data import DocumentDataModule
from infini.tasks.text.stream import DocumentStream
from infini.training.module import ON_HOST, LanguageModelModule
from infini.training.optimizers import configured_groups

MODELS = sorted(set(registered("language_model")) - {"llm"})
"""Those that are trained from scratch."""
WITH_MEMORY = with_memory()
SEGMENT = 8


class Split:
    """Documents of token ids with the attributes a training stream reads."""

    name, split, revision, tokenizer_name = "tiny", "train", "r", "t"

    def __init__(self, tokens: Sequence[np.ndarray]) -> None:
        self.tokens = tokens
        self.n_tokens = np.array([len(ids) for ids in tokens])

    def __len__(self) -> int:
        return len(self.tokens)

    def ids(self, index: int) -> np.ndarray:
        return self.tokens[index]


def random_documents(count: int = 4, length: int = 300) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(VOCABULARY - 1, size=length + 7 * number) for number in range(count)]


def recipe_overrides(steps: int, segments: int = 2) -> list[str]:
    return [
        f"recipe.steps={steps}",
        f"recipe.warmup_steps={min(4, steps)}",
        "recipe.batch_size=2",
        f"recipe.segments_per_sequence={segments}",
    ]


def fit(
    model: Any,
    cfg: Config,
    documents: Sequence[np.ndarray] | None = None,
    carry_state: bool = True,
    callbacks: Sequence[Callback] = (),
) -> LanguageModelModule:
    """Train `model` for the recipe's steps and return the module, its losses read."""
    recipe = cfg.recipe
    split: Any = Split(random_documents() if documents is None else documents)
    stream = DocumentStream(split, recipe.batch_size, recipe.segments_per_sequence, SEGMENT, VOCABULARY - 1, cfg.seed)
    module = LanguageModelModule(model.train(), cfg.optimizer, recipe, carry_state)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=recipe.steps,
        max_epochs=-1,
        gradient_clip_val=cfg.optimizer.clip_norm,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(stream, batch_size=None))
    module.read_losses()
    return module


class Rates(Callback):
    """The learning rates each optimizer step is made with."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append({group["name"]: group["lr"] for group in optimizer.param_groups})


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_each_step_has_the_recipes_rate(schedule: str) -> None:
    cfg = compose([*recipe_overrides(9), f"recipe.schedule={schedule}", "recipe.final_lr_fraction=0.2"])
    rates = Rates()
    fit(make_model(WITH_MEMORY[0], torch.float32), cfg, callbacks=[rates])
    factors = [cfg.recipe.rate_factor(step) for step in range(1, 10)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[-1] == pytest.approx(0.2 if schedule == "cosine" else 1.0)
    assert [rate["matrices"] for rate in rates.seen] == pytest.approx([factor * cfg.optimizer.lr for factor in factors])
    assert [rate["gates"] for rate in rates.seen] == pytest.approx([f * cfg.optimizer.gate_lr for f in factors])


def trainings():
    """Two models with the optimizer that laptops take, one of them with another; the other pairs are slow."""
    usual = compose([]).optimizer.name
    quick_pairs = {("infini_linear", usual), ("infini_linear", "adafactor"), ("rmt", usual)}
    for name in MODELS:
        for optimizer in groups()["optimizer"]:
            quick = (name, optimizer) in quick_pairs
            yield pytest.param(name, optimizer, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "optimizer"), trainings())
def test_training_learns_a_repetitive_corpus(name: str, optimizer: str) -> None:
    torch.manual_seed(0)
    # Adafactor's rate is a fraction of the weights' size.
    rate = 0.1 if optimizer == "adafactor" else 0.02
    cfg = compose([*recipe_overrides(100), f"optimizer={optimizer}", f"optimizer.lr={rate}"])
    model = build_model({"name": name}, tiny_dims(), VOCABULARY)
    module = fit(model, cfg, [np.tile(np.arange(7), 80), np.tile(np.arange(6, -1, -1), 90)])
    losses = [loss for _, loss in module.loss_curve]
    assert [step for step, _ in module.loss_curve] == list(range(1, 101))
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.25)
    assert np.mean(losses[-5:]) < 0.35 * losses[0]


def test_tokens_seen_are_the_scored_ones() -> None:
    # Two rows of 16 tokens a step; each document of 20 tokens ends in a segment with 4 of 8 tokens.
    module = fit(
        make_model(WITH_MEMORY[0], torch.float32), compose(recipe_overrides(3)), random_documents(4, 20)[:1] * 4
    )
    assert 0 < module.tokens_seen < 3 * 2 * 16
    whole = fit(make_model(WITH_MEMORY[0], torch.float32), compose(recipe_overrides(3)), [np.zeros(800, np.int64)] * 4)
    assert whole.tokens_seen == 3 * 2 * 16


def batch(seed: int, reset: bool = False) -> dict[str, torch.Tensor]:
    """Two rows of two segments inside a document, or at its beginning."""
    ids = torch.randint(VOCABULARY, (2, 2 * SEGMENT + 1), generator=torch.Generator().manual_seed(seed))
    resets = torch.zeros(2, 2 * SEGMENT, dtype=torch.bool)
    resets[:, 0] = reset
    mask = torch.ones_like(resets)
    return {"ids_BT": ids[:, :-1], "targets_BT": ids[:, 1:], "mask_BT": mask, "reset_BT": resets}


def second_loss(options: dict[str, Any], carry_state: bool, first: int, reset: bool = False) -> float:
    """Loss of a sequence after the sequence of seed `first`; both are back-propagated through, as in a training."""
    cfg = compose(recipe_overrides(3))
    module = LanguageModelModule(make_model(options), cfg.optimizer, cfg.recipe, carry_state)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    module.training_step(batch(first, reset=True), 0).backward()
    loss = module.training_step(batch(9, reset), 1)
    loss.backward()  # would fail if the graph reached into the first sequence, which is freed
    return loss.item()


@pytest.mark.parametrize("options", WITH_MEMORY, ids=variant_id)
def test_carried_state_is_read_by_the_next_sequence(options: dict[str, Any]) -> None:
    assert abs(second_loss(options, True, first=1) - second_loss(options, True, first=2)) > 1e-6
    assert second_loss(options, False, first=1) == second_loss(options, False, first=2)
    assert second_loss(options, True, first=1, reset=True) == pytest.approx(second_loss(options, False, first=1))


@pytest.mark.parametrize("options", variants(), ids=variant_id)
def test_no_gradient_crosses_sequences_and_it_reaches_through_one(options: dict[str, Any]) -> None:
    cfg = compose(recipe_overrides(3))
    module = LanguageModelModule(make_model(options), cfg.optimizer, cfg.recipe, carry_state=True)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    module.training_step(batch(1), 0)
    assert module.carried is not None
    assert not any(leaf.requires_grad for _, leaf in leaves(module.carried))
    used: list[torch.Tensor] = []

    def keep(_: Any, __: Any, embedded_BTD: torch.Tensor) -> None:
        embedded_BTD.retain_grad()
        used.append(embedded_BTD)

    next(part for part in module.model.modules() if isinstance(part, torch.nn.Embedding)).register_forward_hook(keep)
    inside = batch(2)
    inside["targets_BT"] = inside["targets_BT"].clone()
    inside["targets_BT"][:, :SEGMENT] = -100
    module.training_step(inside, 1).backward()
    assert used[0].grad is not None
    reached = bool(used[0].grad[:, : SEGMENT - 1].any())
    model = module.model
    if model.gradient_horizon in (None, 0):
        # The document decides where else the gradient is cut: test_rmt.py.
        assert reached == (model.gradient_horizon is None or model.segment_length > SEGMENT)


def test_models_of_one_seed_see_the_same_data_and_start_alike() -> None:
    """No model has a memory to read if a sequence has one segment and nothing is carried: those of one local
    attention are one and the same."""
    curves = {}
    alike = ["infini_linear", "infini_delta", "local", "full"]
    for name in alike:
        # All have one rate; otherwise each has its own where a search found it.
        cfg = compose([*recipe_overrides(12, segments=1), f"model={name}", "tuned=null"])
        torch.manual_seed(cfg.seed)
        model = build_model(cfg.model, tiny_dims(), VOCABULARY)
        curves[name] = fit(model, cfg, carry_state=False).loss_curve
    for name in alike:
        np.testing.assert_allclose(curves[name], curves["local"], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", ["infini_delta", "local"])
def test_one_seed_is_one_training(name: str) -> None:
    def curve(seed: int) -> list[list[float]]:
        cfg = compose([*recipe_overrides(5), f"seed={seed}"])
        torch.manual_seed(seed)
        return fit(build_model({"name": name}, tiny_dims(), VOCABULARY), cfg).loss_curve

    assert curve(3) == curve(3) != curve(4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def train(corpus: Path, results: Path, *overrides: str) -> RunRecord:
    words = [*TINY, "logger=none", f"task.data_dir={corpus}", f"results_dir={results}", *overrides]
    return train_command.train(compose(words), words)


def test_validation_needs_no_memory_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and the optimizer's state are three times the weights."""
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
    configure, validate = LanguageModelModule.configure_optimizers, DocumentDataModule.validate

    def configured(self: LanguageModelModule) -> Any:
        made = configure(self)
        optimizers.append(weakref.ref(made["optimizer"]))
        return made

    def validated(self: DocumentDataModule, model: torch.nn.Module, device: torch.device) -> Any:
        assert [reference() for reference in optimizers] == [None]
        assert all(weight.grad is None for weight in model.parameters())
        return validate(self, model, device)

    monkeypatch.setattr(LanguageModelModule, "configure_optimizers", configured)
    monkeypatch.setattr(DocumentDataModule, "validate", validated)
    train(write_corpus(tmp_path / "corpus"), tmp_path / "results")


def stop_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C in the middle of a step, counted from 1."""
    real = LanguageModelModule.training_step

    def interrupted(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step + 1 == step:
            raise KeyboardInterrupt
        return real(self, batch, index)

    patch.setattr(LanguageModelModule, "training_step", interrupted)


def weights(results: Path, record: RunRecord) -> dict[str, torch.Tensor]:
    return load_file(results / "checkpoints" / record.run_id / "model.safetensors")


def assert_same_training(a: tuple[Path, RunRecord], b: tuple[Path, RunRecord]) -> None:
    assert a[1].series["loss_curve"] == b[1].series["loss_curve"]
    assert a[1].results == b[1].results
    assert a[1].cost["tokens_seen"] == b[1].cost["tokens_seen"]
    first, second = weights(*a), weights(*b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_gradients_are_no_longer_than_the_configuration_says(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: list[float] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
            return loss

    monkeypatch.setattr(
        "infini.training.module.build_optimizer",
        lambda model, config, products: Watched(configured_groups(model, config)),
    )
    for number, limit in enumerate(("null", "0.01")):
        train(corpus, tmp_path / str(number), f"optimizer.clip_norm={limit}")
    assert len(norms) == 6 and min(norms[:3]) > 0.02
    assert norms[3:] == pytest.approx([0.01] * 3, rel=1e-3)


@pytest.mark.parametrize("model", ["infini_linear", "local"])
def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    seven = [f"model={model}", "recipe.steps=7", "recipe.segments_per_sequence=3"]
    straight = train(corpus, tmp_path / "straight", *seven)
    assert [step for step, _ in straight.series["loss_curve"]] == list(range(1, 8))

    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 6)
        train(corpus, stopped, *seven, "recipe.save_every=4")
    assert not (stopped / "runs").exists()
    resumed = train(corpus, stopped, *seven, "recipe.save_every=4")
    assert resumed.cost["resumed"] and not straight.cost["resumed"]
    assert_same_training((stopped, resumed), (tmp_path / "straight", straight))
    # A finished training is not resumed.
    assert not list(stopped.glob("unfinished/*/*.ckpt"))
    assert not train(corpus, stopped, *seven, "recipe.save_every=4").cost["resumed"]


def test_a_training_can_be_stopped_again_and_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["recipe.steps=7", "recipe.save_every=2"]
    straight = train(corpus, tmp_path / "straight", "recipe.steps=7")
    stopped = tmp_path / "stopped"
    for step in (2, 4, 6):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            stop_at(patch, step)
            train(corpus, stopped, *overrides)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DocumentDataModule, "validate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        train(corpus, stopped, *overrides)
    assert_same_training((stopped, train(corpus, stopped, *overrides)), (tmp_path / "straight", straight))


def test_the_carried_state_is_part_of_a_checkpoint() -> None:
    cfg = compose(recipe_overrides(3))
    module = LanguageModelModule(make_model(WITH_MEMORY[0]), cfg.optimizer, cfg.recipe, carry_state=True)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    module.training_step(batch(1), 0)
    module.stage, module.stage_loss, module.stage_steps = 2, 0.75, [3, 8]
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    other = LanguageModelModule(make_model(WITH_MEMORY[0]), cfg.optimizer, cfg.recipe, carry_state=True)
    other.on_load_checkpoint(checkpoint)
    assert (other.stage, other.stage_loss, other.stage_steps) == (2, 0.75, [3, 8])
    for (path, mine), (_, theirs) in zip(leaves(module.carried), leaves(other.carried), strict=True):
        assert torch.equal(mine, theirs), path
    assert other.loss_curve == module.loss_curve
    assert other.tokens_seen == 2 * 2 * SEGMENT
    # A checkpoint of before the curve of recall still resumes.
    del checkpoint["infini"]["recall_curve"]
    other.on_load_checkpoint(checkpoint)
    assert other.recall_curve == [] and other.loss_curve == module.loss_curve


def test_what_a_checkpoint_carries_goes_to_the_device_of_the_model() -> None:
    """A checkpoint is loaded before Lightning moves the model: state and histories follow it to its device."""
    cfg = compose(recipe_overrides(3))
    module = LanguageModelModule(make_model(WITH_MEMORY[0]), cfg.optimizer, cfg.recipe, carry_state=True)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    module.training_step(batch(1), 0)
    module.histories = module.carried
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    other = LanguageModelModule(make_model(WITH_MEMORY[0]), cfg.optimizer, cfg.recipe, carry_state=True)
    other.on_load_checkpoint(checkpoint)
    other.to("meta")
    other.on_train_start()
    for state in (other.carried, other.histories):
        assert state is not None
        assert_on(state, "meta")


def test_a_checkpoint_is_loaded_before_the_model_is_moved_and_training_starts_after(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of Lightning's hooks that the test above relies on."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 3)
        train(corpus, tmp_path, "recipe.steps=4", "recipe.save_every=2")
    order: list[str] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            order.append(name)
            return real(*arguments)

        monkeypatch.setattr(owner, name, watched)

    watch(LanguageModelModule, "on_load_checkpoint")
    watch(SingleDeviceStrategy, "model_to_device")
    watch(LanguageModelModule, "on_train_start")
    watch(LanguageModelModule, "training_step")
    train(corpus, tmp_path, "recipe.steps=4", "recipe.save_every=2")
    assert order[:4] == ["on_load_checkpoint", "model_to_device", "on_train_start", "training_step"]


@pytest.mark.parametrize(("step", "steps"), [(3, 15), (3, 4), (12, 15)], ids=["early", "few steps", "late"])
def test_a_loss_that_is_not_a_number_stops_with_its_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, steps: int
) -> None:
    real = LanguageModelModule.training_step

    def broken(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step + 1 == step:
            with torch.no_grad():
                self.model.embedding.weight.fill_(math.nan)
        return real(self, batch, index)

    monkeypatch.setattr(LanguageModelModule, "training_step", broken)
    with pytest.raises(InputError) as error:
        train(corpus, tmp_path, f"recipe.steps={steps}", "recipe.save_every=2")
    assert str(error.value).startswith("optimizer.lr=")
    reason = f"loss is nan at step {step} (the weights embedding.weight are not finite)"
    assert f": {reason}; try a lower optimizer.lr. " in str(error.value)
    assert f"The last good checkpoint is of step {(step - 1) // 2 * 2}" in str(error.value)
    (record,) = load_records(tmp_path)
    assert record.diverged == {"step": step, "reason": reason}
    assert [at for at, _ in record.series["loss_curve"]] == list(range(1, step))


def test_the_layer_of_a_value_that_is_not_finite_is_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LanguageModelModule.training_step

    def broken(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step + 1 == 2:
            self.model.blocks[1].attention.o_proj.register_forward_hook(lambda *given: given[2] * math.inf)
        return real(self, batch, index)

    monkeypatch.setattr(LanguageModelModule, "training_step", broken)
    with pytest.raises(
        InputError,
        match=r"loss is nan at step 2 \(first .*: blocks.1.attention.o_proj\); try a lower optimizer.lr. .* no check",
    ):
        train(corpus, tmp_path, "dims.n_layers=3")


def test_a_memory_that_is_not_finite_is_named_by_its_layer(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = memory.retrieve

    def broken(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numerator, denominator = real(*arguments)
        return numerator * math.nan, denominator

    monkeypatch.setattr(memory, "retrieve", broken)
    with pytest.raises(InputError, match=r"output: blocks.0.attention, before its o_proj\); try a lower"):
        train(corpus, tmp_path)


def test_weights_that_are_not_finite_are_no_point_to_go_on_from(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LanguageModelModule, optimizer: Any) -> None:
        if self.global_step == 3:
            self.model.blocks[0].attention_norm.weight.grad.fill_(math.nan)

    monkeypatch.setattr(LanguageModelModule, "on_before_optimizer_step", broken)
    with pytest.raises(InputError, match="after step 4 the weights .* are not finite.* is of step 2"):
        train(corpus, tmp_path, "recipe.steps=6", "recipe.save_every=2")


def test_one_batch_is_made_ahead(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes a step while the host makes the next batch, as docs/how-to/many_devices.md says."""
    made: list[Any] = []
    made_before_step: list[int] = []
    make, step = DocumentStream.__next__, LanguageModelModule.training_step

    def counted(self: DocumentStream) -> Any:
        made.append(None)
        return make(self)

    def noted(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        made_before_step.append(len(made))
        return step(self, batch, index)

    monkeypatch.setattr(DocumentStream, "__next__", counted)
    monkeypatch.setattr(LanguageModelModule, "training_step", noted)
    train(corpus, tmp_path, "recipe.steps=3")
    assert made_before_step == [2, 3, 4]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_moves_to_a_gpu_is_pinned_and_nothing_else(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only from pinned memory does Lightning copy without waiting. The tensors by which calls are planned stay."""
    pinned: list[torch.Tensor] = []
    moved: dict[str, Any] = {}

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def transfer(self: Any, batch: dict[str, Any], to: torch.device, dataloader_idx: int) -> dict[str, Any]:
        assert to.type == device
        moved.update(batch)
        return {name: value.to("meta") if torch.is_tensor(value) else value for name, value in batch.items()}

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(lightning.LightningModule, "transfer_batch_to_device", transfer)
    cfg = compose([])
    module = LanguageModelModule(make_model(WITH_MEMORY[0], torch.float32), cfg.optimizer, cfg.recipe, carry_state=True)
    batch = {**training_batch(4, SEGMENT, documents=True), "history_PT": torch.ones(3, 4), "lm_weight": 0.5}
    batch["lm_targets_BT"] = batch["targets_BT"].clone()
    batch["recalled_BT"] = batch["targets_BT"] > 0
    got = module.transfer_batch_to_device(batch, torch.device(device), 0)
    assert {name for name, value in moved.items() if torch.is_tensor(value)} == {"ids_BT", "history_PT"}
    assert moved["lm_weight"] == 0.5
    assert len(pinned) == (2 if device == "cuda" else 0)
    for name in ("ids_BT", "history_PT"):
        assert any(moved[name] is tensor for tensor in pinned) == (device == "cuda"), name
        assert torch.equal(moved[name], batch[name]) and got[name].is_meta
    for name in ON_HOST:
        assert got[name].device.type == "cpu" and torch.equal(got[name], batch[name]), name
