"""A training on several devices is that of one: the same tokens, losses, weights and records."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import SEGMENT, VOCABULARY, assert_close, assert_same_state, make_model, tiny_dims, variants
from helpers import TOLERANCE as TOLERANCES
from ranks import group_of_one, run_ranks
from safetensors.torch import load_file
from tiny_runs import words, write_corpus
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from infini import records
from infini.cli import main as cli
from infini.config.compose import compose
from infini.models import build_model
from infini.nn.protocols import optional
from infini.nn.state import map_state
from infini.training.module import LanguageModelModule
from infini.training.ranks import Ranks, is_lost
from infini.training.strategies import release, shard, whole

STEPS = 20
TOLERANCE = 1e-5
"""Relative, of float32 losses over STEPS steps: the additions are those of one process in another order."""
TWO = ("parallel=ddp", "parallel.devices=2")
SHARDED = ("parallel=fsdp2", "parallel.devices=2")
ONE_SEQUENCE = (*TWO, "parallel.sequence=2")


def command(corpus: Path, results: Path, *more: str, task: str = "pg19") -> list[str]:
    settings = [*words(corpus, results, task), "recipe.batch_size=4", f"recipe.steps={STEPS}", *more]
    # The last setting of a key, which the command would name.
    return ["train", *{text.partition("=")[0]: text for text in settings}.values()]


def run_of(results: Path) -> records.RunRecord:
    (run,) = records.load_records(results)
    return run


def losses(results: Path) -> np.ndarray:
    curve = np.array(run_of(results).series["loss_curve"])
    assert curve[:, 0].tolist() == list(range(1, STEPS + 1))
    return curve[:, 1]


def weights(results: Path) -> dict[str, torch.Tensor]:
    return load_file(results / "checkpoints" / run_of(results).run_id / "model.safetensors")


def assert_equal_runs(one: Path, other: Path, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(losses(other), losses(one), rtol=tolerance)
    assert run_of(one).cost["tokens_seen"] == run_of(other).cost["tokens_seen"]
    for name, result in run_of(one).results.items():
        assert run_of(other).results[name]["value"] == pytest.approx(result["value"], rel=10 * tolerance)
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert_close(theirs[name], weight, 10 * tolerance, name)
    assert not list(other.glob("unfinished/*"))


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("straight")
    assert cli.main(command(corpus, results)) == 0
    return results


def test_two_processes_train_as_one(
    straight: Path, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = dict(os.environ)
    assert cli.main(command(corpus, tmp_path, *TWO, "logger=csv")) == 0
    assert_equal_runs(straight, tmp_path)
    # Rank 0 alone prints, logs and records.
    out, err = capfd.readouterr()
    # A process that imported torch before the command, as this one, also prints a note on DistributedDataParallel.
    said = [line.split()[0] for line in err.splitlines() if "reducer.cpp" not in line]
    parameters = f"{run_of(tmp_path).run_id}:"
    # torch 2.10 prints that its processes are connected.
    printed = [line for line in out.splitlines() if not line.startswith("[Gloo] ")]
    assert not printed and said == ["training", parameters, "step", "trained", "model:", "record:"]
    assert len(list(tmp_path.glob("logs/*"))) == 1
    assert run_of(tmp_path).environment["ranks"] == 2
    assert dict(os.environ) == before and not torch.distributed.is_initialized()


@pytest.mark.slow
def test_two_processes_penalise_writes_as_one(corpus: Path, tmp_path: Path) -> None:
    """The weight of the penalty follows the loss, of which each process computes a part."""
    penalised = ("recipe.sparse_writes=0.3", "recipe.sparse_loss_scale=20")
    for folder, more in (("one", ()), ("two", TWO), ("constant", ("recipe.sparse_loss_scale=null",))):
        assert cli.main(command(corpus, tmp_path / folder, *penalised, *more)) == 0
    assert_equal_runs(tmp_path / "one", tmp_path / "two")
    assert abs(losses(tmp_path / "constant") - losses(tmp_path / "one")).max() > 1e-3


@pytest.mark.slow
def test_two_processes_read_one_sequence_as_one(straight: Path, corpus: Path, tmp_path: Path) -> None:
    """States are carried into the next sequence, and documents end inside one."""
    assert cli.main(command(corpus, tmp_path, *ONE_SEQUENCE)) == 0
    assert_equal_runs(straight, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("parallel=fsdp2", "parallel.devices=2", "parallel.sequence=2"),
        ("parallel=ddp", "parallel.devices=4", "parallel.sequence=2", "parallel.accumulate=2"),
        ("parallel=fsdp2", "parallel.devices=4", "parallel.sequence=2"),
    ],
)
def test_rows_and_sequences_are_shared_at_once(
    more: tuple[str, ...], straight: Path, corpus: Path, tmp_path: Path
) -> None:
    assert cli.main(command(corpus, tmp_path, *more)) == 0
    assert_equal_runs(straight, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model"), [("pg19", "infini_delta"), ("pg19", "local"), ("passkey", "infini_delta")])
def test_one_sequence_for_other_models_and_tasks(task: str, model: str, corpus: Path, tmp_path: Path) -> None:
    more = [f"model={model}"]
    if task == "passkey":
        additions = ("curriculum", "length_extension", "long_history", "sparse_writes")
        more += [f"recipe.{name}=null" for name in additions]
    for folder, ranks in (("one", ()), ("two", ONE_SEQUENCE)):
        assert cli.main(command(corpus, tmp_path / folder, *more, *ranks, task=task)) == 0
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_model_without_a_scan_is_refused(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command(corpus, tmp_path, *ONE_SEQUENCE, "model=rmt")) == cli.USAGE_ERROR
    *_, said = capfd.readouterr().err.splitlines()
    assert said.startswith("infini: error: parallel.sequence=2: RMT: one sequence over many ranks needs")
    assert not records.load_records(tmp_path)


def test_parts_of_a_step_train_as_the_whole(straight: Path, corpus: Path, tmp_path: Path) -> None:
    assert cli.main(command(corpus, tmp_path, "parallel.accumulate=4")) == 0
    assert_equal_runs(straight, tmp_path)


@pytest.mark.parametrize(
    "more",
    [("parallel.accumulate=4",), pytest.param(TWO, marks=pytest.mark.slow)],
    ids=["accumulate", "ddp"],
)
def test_segments_end_alike_in_all_parts_and_ranks(more: tuple[str, ...], corpus: Path, tmp_path: Path) -> None:
    """A model that draws them: neither the parts of a step nor what else was drawn before decide where."""
    drawn = ("model=autocompressor", "model.random_segments=true", "recipe.segments_per_sequence=4")
    for folder, own in (("one", ()), ("other", more)):
        assert cli.main(command(corpus, tmp_path / folder, *drawn, *own)) == 0
    assert_equal_runs(tmp_path / "one", tmp_path / "other")
    assert cli.main(command(corpus, tmp_path / "whole", *drawn[:1], *drawn[2:])) == 0
    assert abs(losses(tmp_path / "whole") - losses(tmp_path / "one")).max() > 1e-3


ADDITIONS = (
    *("recipe.length_extension=50", "recipe.length_extension_share=1", "recipe.long_history=[2,20]"),
    *("recipe.sparse_writes=0.1", "recipe.sparse_loss_scale=4"),
)


def step_of(ranks: Ranks, parts: int, carry_state: bool, monkeypatch: pytest.MonkeyPatch) -> LanguageModelModule:
    """A module after two steps' gradients in float64, on rows with different numbers of tokens and targets."""
    cfg = compose(["model=infini_delta", "task=passkey", "scale=laptop", *ADDITIONS])
    torch.manual_seed(0)
    model = build_model(cfg.model, tiny_dims(), VOCABULARY).double()
    cfg.recipe.curriculum, cfg.recipe.loss_chunk = None, 5
    module = LanguageModelModule(model, cfg.optimizer, cfg.recipe, carry_state, 1, ranks, parts)
    rng = torch.Generator().manual_seed(1)
    monkeypatch.setattr(Ranks, "summed", lambda self, value: value)
    monkeypatch.setattr(LanguageModelModule, "log", lambda *_, **__: None)
    for _ in range(2):
        ids = torch.randint(VOCABULARY, (6, 4 * SEGMENT), generator=rng)
        # Rows of a stream are padded to whole segments.
        lengths = [32, 24, 32, 32, 16, 32] if carry_state else [32, 30, 32, 17, 9, 32]
        mask = torch.arange(4 * SEGMENT) < torch.tensor(lengths)[:, None]
        targets = ids.roll(-1, 1).masked_fill(~mask, -100)
        targets[1:3] = targets[1:3].masked_fill(torch.arange(4 * SEGMENT) < 28, -100)
        # The rows of the last third have no target at all.
        targets[4:] = -100
        batch = {"ids_BT": ids, "targets_BT": targets, "mask_BT": mask, "reset_BT": torch.zeros_like(mask)}
        batch["reset_BT"][:, 0] = torch.tensor([True, False, False, True, False, False])
        batch |= {"lm_targets_BT": ids.roll(-1, 1).masked_fill(~mask, -100), "lm_weight": 0.3}
        batch["history_PT"] = torch.randint(VOCABULARY, (2, 2 * SEGMENT), generator=rng)
        batch = module.transfer_batch_to_device(batch, torch.device("cpu"), 0)
        # The loss of the step before, of all ranks, which nothing sums here.
        module.loss_curve = [[0, 3.0]]
        module.training_step(batch, 0).backward()
    return module


@pytest.mark.parametrize("carry_state", [False, True])
@pytest.mark.parametrize(("size", "parts"), [(1, 3), (3, 1), (3, 2)])
def test_the_gradients_of_all_ranks_and_parts_are_those_of_one(
    size: int, parts: int, carry_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP and FSDP average the ranks' gradients, with every addition to the training."""
    one = step_of(Ranks(), 1, carry_state, monkeypatch)
    shares = [step_of(Ranks(rank=rank, size=size), parts, carry_state, monkeypatch) for rank in range(size)]
    for (name, expected), *own in zip(one.named_parameters(), *(m.named_parameters() for m in shares), strict=True):
        grads = [torch.zeros_like(expected) if p.grad is None else p.grad for _, p in own]
        assert expected.grad is not None
        assert_close(torch.stack(grads).mean(0), expected.grad, TOLERANCES[torch.float64], name)
    assert sum(m.last_loss for m in shares) == pytest.approx(one.last_loss, rel=1e-8)
    assert [m.tokens_seen for m in shares] == [one.tokens_seen] * size
    if carry_state:
        rows = [m.carried for m in shares]
        assert_same_state(map_state(lambda *x: torch.cat(x), *rows), one.carried, TOLERANCES[torch.float64])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["parallel.devices=2"], "parallel.devices=2: parallel=single takes one; add parallel=ddp or parallel=fsdp2"),
        (["parallel.nodes=2"], "parallel.nodes=2: parallel=single takes one; add parallel=ddp or parallel=fsdp2"),
        (
            ["parallel=ddp", "parallel.nodes=2"],
            "parallel.nodes=2: several nodes need torchrun on each; see docs/how-to/many_devices.md",
        ),
        (
            ["parallel=ddp", "parallel.devices=3"],
            "recipe.batch_size=4: must be a multiple of 3: devices, 3, x parallel.accumulate=1; try 3 or 6",
        ),
        (
            ["parallel.accumulate=3"],
            "recipe.batch_size=4: must be a multiple of 3: devices, 1, x parallel.accumulate=3; try 3 or 6",
        ),
        (
            [*SHARDED, "optimizer=adafactor"],
            "optimizer=adafactor: parallel=fsdp2 takes adamw or muon; or use parallel=ddp",
        ),
        (["parallel.sequence=2"], "parallel.sequence=2: parallel=single takes one; add parallel=ddp or parallel=fsdp2"),
        ([*TWO, "parallel.sequence=3"], "parallel.sequence=3: must divide the number of devices, 2"),
        (
            [*ONE_SEQUENCE, "recipe.segments_per_sequence=1"],
            "parallel.sequence=2: each device needs a segment of recipe.segments_per_sequence=1",
        ),
        (
            ["parallel=ddp", "parallel.devices=6", "parallel.sequence=2"],
            "recipe.batch_size=4: must be a multiple of 3: devices, 6, / parallel.sequence=2 x parallel.accumulate=1; "
            "try 3 or 6",
        ),
        (
            [*ONE_SEQUENCE, "recipe.checkpoint_segments=1"],
            "recipe.checkpoint_segments=1: must be null with parallel.sequence=2",
        ),
        ([*TWO, "parallel.strategy=fsdp"], "parallel.strategy='fsdp': parallel=ddp takes auto"),
    ],
)
def test_what_cannot_be_shared_is_one_line(
    more: list[str], said: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(corpus, tmp_path, *more)) == cli.USAGE_ERROR
    assert capfd.readouterr().err.splitlines() == [f"infini: error: {said}"]


@pytest.mark.parametrize(
    ("name", "stay"), [("infini_delta", False), ("transformer_xl", False), ("llm", True), ("rmt", None)]
)
@pytest.mark.parametrize("calls", [1, 2])
def test_shards_are_gathered_layer_by_layer(name: str, stay: bool | None, calls: int, tmp_path: Path) -> None:
    """The weights of layers are shards again after a forward pass, or, where a gradient comes by the state alone, after
    the backward pass. The values are those without shards. stay: None for a model that is gathered whole."""
    model = make_model(next(options for options in variants() if options["name"] == name))
    ids = torch.randint(VOCABULARY, (2, 3 * model.segment_length))
    parts = ids.split(3 * model.segment_length // calls + 1, 1)

    def last_of_all_calls() -> torch.Tensor:
        state = None
        for part in parts:
            hidden, state, _ = model(part, state)
        return hidden

    expected = last_of_all_calls()
    expected.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    of_layer = re.compile(r"(blocks|layers)\.\d")

    def in_layers() -> set[bool]:
        """Whether the weights of layers are shards."""
        return {isinstance(p, DTensor) for name, p in model.named_parameters() if of_layer.search(name)}

    with group_of_one(tmp_path):
        layers, hides = optional(model, "called_layers"), optional(model, "hides_states")
        assert hides == bool(stay) and (stay is None) == (not layers)
        shard(model, init_device_mesh("cpu", (1,)), layers, hides)
        hidden = last_of_all_calls()
        assert in_layers() == ({True} if stay is False else {False})
        assert any("embed" in name and not isinstance(p, DTensor) for name, p in model.named_parameters())
        hidden.sum().backward()
        if hides:
            assert in_layers() == {False}
            release(layers)
        assert in_layers() == {True}
        assert_close(hidden, expected, TOLERANCES[torch.float64], "hidden")
        for name, parameter in model.named_parameters():
            if name in gradients:
                assert_close(whole(parameter.grad), gradients[name], TOLERANCES[torch.float64], name)


def test_the_gradients_of_a_pretrained_layer_are_shared_out_when_they_are_there(tmp_path: Path) -> None:
    """Whole gradients of all layers take as much memory as the weights, which stay gathered as it is."""
    model = make_model(next(options for options in variants() if options["name"] == "llm"))
    ids = torch.randint(VOCABULARY, (2, model.segment_length))
    whole_gradients = []
    with group_of_one(tmp_path):
        shard(model, init_device_mesh("cpu", (1,)), model.called_layers, model.hides_states)
        first, second = model.called_layers

        def between(layer: Any, inputs: Any, hidden: torch.Tensor) -> None:
            hidden.register_hook(lambda _: whole_gradients.append([p.grad is not None for p in second.parameters()]))

        first.register_forward_hook(between)
        model(ids).hidden_BTD.sum().backward()
        assert len(whole_gradients) == 1 and not any(whole_gradients[0])
        release(model.called_layers)
        assert all(isinstance(p.grad, DTensor) for p in second.parameters() if p.requires_grad)


@pytest.mark.parametrize("n_rows", [4, 7, 12])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_row_has_one_rank(n_rows: int, size: int) -> None:
    read = [row for rank in range(size) for row in range(*Ranks(rank=rank, size=size).bounds(n_rows))]
    assert read == list(range(n_rows))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_wait_for_rank_0_has_a_limit_of_its_own(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day, not the 30 minutes of other waits. The group is made before rank 0 begins, so that all meet at once."""
    did: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda **options: did.append(options))
    monkeypatch.setattr(dist, "barrier", lambda group: did.append("wait"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    Ranks(rank, size=2).first_alone(lambda: did.append("prepare"))
    group, *rest = did
    assert group == {"timeout": timedelta(days=1), "backend": "gloo"}
    assert rest == (["prepare", "wait"] if rank == 0 else ["wait", "prepare"])


def _meet_with_a_short_limit() -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    made = Ranks(dist.get_rank(), size=2)
    made.first_alone(lambda: time.sleep(4 if made.rank == 0 else 0))
    assert made.agreed(made.rank) == 0


@pytest.mark.slow
def test_rank_0_prepares_for_longer_than_other_waits() -> None:
    run_ranks(_meet_with_a_short_limit, 2)


def test_a_rank_that_does_not_answer_is_lost() -> None:
    """gloo says this at the end of a time limit: one line, and no traceback, as when the other process has ended."""
    said = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
    assert is_lost(RuntimeError(said))
    assert not is_lost(RuntimeError("CUDA out of memory"))


def stop_at(step: int, stop: Callable[[], Any]) -> pytest.MonkeyPatch:
    """Call stop() in this process, rank 0, at this step."""
    real = LanguageModelModule.training_step

    def stopping(self: LanguageModelModule, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == step:
            stop()
        return real(self, batch, index)

    patch = pytest.MonkeyPatch()
    patch.setattr(LanguageModelModule, "training_step", stopping)
    return patch


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), TWO),
        (TWO, ()),
        (TWO, SHARDED),
        (SHARDED, ()),
        ((), SHARDED),
        (TWO, TWO),
        (SHARDED, SHARDED),
        (ONE_SEQUENCE, TWO),
    ],
)
def test_a_checkpoint_moves_between_numbers_of_processes(
    before: tuple[str, ...], after: tuple[str, ...], straight: Path, corpus: Path, tmp_path: Path
) -> None:
    patch = stop_at(11, interrupt)
    assert cli.main(command(corpus, tmp_path, *before)) == cli.INTERRUPTED
    patch.undo()
    assert cli.main(command(corpus, tmp_path, *after)) == 0
    assert run_of(tmp_path).cost["resumed"]
    assert_equal_runs(straight, tmp_path)


def test_a_training_moves_to_two_processes_and_back(straight: Path, corpus: Path, tmp_path: Path) -> None:
    """One process, then two that share each sequence and the weights, then one again. The slow tests resume every setup
    by every other."""
    shared = (*SHARDED, "parallel.sequence=2")
    for step, setup in ((6, ()), (13, shared)):
        patch = stop_at(step, interrupt)
        assert cli.main(command(corpus, tmp_path, *setup)) == cli.INTERRUPTED
        patch.undo()
    assert cli.main(command(corpus, tmp_path)) == 0
    assert run_of(tmp_path).cost["resumed"]
    assert_equal_runs(straight, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
@pytest.mark.parametrize("setup", [TWO, SHARDED, (*TWO, "parallel.accumulate=2")], ids=["ddp", "fsdp2", "accumulate"])
@pytest.mark.parametrize("task", ["pg19", "passkey"])
def test_every_setup_trains_as_one_process(
    task: str, setup: tuple[str, ...], optimizer: str, corpus: Path, tmp_path: Path
) -> None:
    if optimizer == "adafactor" and setup == SHARDED:
        pytest.skip("refused")
    for name, more in (("one", ()), ("two", setup)):
        assert cli.main(command(corpus, tmp_path / name, *more, f"optimizer={optimizer}", task=task)) == 0
    # Five answers a step: rounding errors of their gradients grow faster.
    assert_equal_runs(tmp_path / "one", tmp_path / "two", TOLERANCE if task == "pg19" else 10 * TOLERANCE)
    one, two = (run_of(tmp_path / name).series.get("recall_curve") for name in ("one", "two"))
    assert one == two and (task == "pg19") == (one is None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [TWO, SHARDED, (*SHARDED, "parallel.accumulate=2"), (*SHARDED, "recipe.checkpoint_activations=true")],
    ids=["ddp", "fsdp2", "fsdp2, accumulate", "fsdp2, checkpointed"],
)
def test_a_pretrained_model_continues_on_a_mixture_as_in_one_process(more: tuple[str, ...], tmp_path: Path) -> None:
    """All weights and the gates of an injected model, from the same base. Documents begin inside the sequences of one
    rank and not of the other, where a pretrained model cuts its calls."""
    pytest.importorskip("transformers")
    from tiny_llms import write_tiny_base

    base, corpora = write_tiny_base(tmp_path / "base"), tmp_path / "corpora"
    for source in ("pg19", "arxiv_math"):
        write_corpus(corpora / source)
    mixture = ["task=continual", "task.min_tokens=16", f"task.data_dir={corpora}", "model=llm", f"model.base={base}"]
    mixture.append("optimizer.lr=0.01")
    for name, ranks in (("one", ()), ("two", more)):
        line = command(corpora, tmp_path / name, *mixture, *ranks)
        # Its sizes and its vocabulary are the base's.
        line = [word for word in line if not word.startswith(("dims.d_", "dims.n_", "scale.vocab_size="))]
        assert cli.main(line) == 0
    assert_equal_runs(tmp_path / "one", tmp_path / "two")
    run = run_of(tmp_path / "two")
    assert (run.environment["ranks"], run.data["sources"].keys()) == (2, {"pg19", "arxiv_math"})
    assert losses(tmp_path / "two")[-1] < losses(tmp_path / "two")[0]
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, weight in one.items():
        assert_close(two[name], weight, 1e-3, name)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["all", "lora", "lora model.dtype=bfloat16"])
def test_a_pretrained_model_learns_prompts_as_in_one_process(train: str, corpus: Path, tmp_path: Path) -> None:
    """Prompts have different lengths, so that ranks pad differently."""
    pytest.importorskip("transformers")
    from tiny_llms import write_tiny_base

    base = write_tiny_base(tmp_path / "base")
    asked = ["model=llm", f"model.base={base}", "optimizer.lr=0.01", "dims.segment_length=64"]
    asked += f"model.train={train}".split()
    asked += ["recipe.segments_per_sequence=16", "recipe.curriculum=[[64,1024,10]]", "recipe.batch_size=2"]
    asked += ["recipe.advance_below=0.01", "recipe.long_history=null", "recipe.short_sequences=null"]
    for name, ranks in (("one", ()), ("two", SHARDED)):
        line = command(corpus, tmp_path / name, *asked, *ranks, task="passkey")
        line = [word for word in line if not word.startswith(("dims.d_", "dims.n_", "scale.vocab_size="))]
        assert cli.main(line) == 0
    # bfloat16 rounds activations, to which the order of additions is not the same.
    assert_equal_runs(tmp_path / "one", tmp_path / "two", 1e-2 if "bfloat16" in train else TOLERANCE)


def start(corpus: Path, results: Path, *more: str, launcher: tuple[str, ...] = ("-m", "infini")) -> Any:
    """A training in processes of its own."""
    launched = [sys.executable, *launcher, *command(corpus, results, *more)]
    return subprocess.Popen(
        launched, cwd=results.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def when(true: Callable[[], Any], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks up processes in /proc")
@pytest.mark.parametrize(
    ("setup", "victim"),
    [(TWO, 0), (TWO, 1), (SHARDED, 1), (ONE_SEQUENCE, 1)],
    ids=["ddp, first", "ddp, second", "fsdp2, second", "one sequence, second"],
)
def test_a_killed_process_ends_the_others_and_the_training_resumes(
    setup: tuple[str, ...], victim: int, corpus: Path, tmp_path: Path
) -> None:
    whole, results = tmp_path / "whole", tmp_path / "results"
    assert cli.main(command(corpus, whole, *setup)) == 0
    made = start(corpus, results, *setup)
    when(lambda: list(results.glob("unfinished/*/step-*.ckpt")))
    (other,) = children(made.pid)
    os.kill((made.pid, other)[victim], signal.SIGKILL)
    said = made.communicate(timeout=60)[0]
    assert made.returncode == (-signal.SIGKILL, cli.USAGE_ERROR)[victim]
    when(lambda: not Path(f"/proc/{other}").exists(), 30)
    assert "Traceback" not in said
    if victim:
        assert "another process of this training has ended (rank 1, exit code -9); the same command resumes" in said
    assert not records.load_records(results)
    assert cli.main(command(corpus, results, *setup)) == 0
    assert run_of(results).cost["resumed"]
    # The resumed training on the same number of processes is the uninterrupted one bit for bit.
    assert losses(results).tolist() == losses(whole).tolist()
    assert all(torch.equal(mine, weights(whole)[name]) for name, mine in weights(results).items())


def assert_its_process_ends(launcher: subprocess.Popen[Any]) -> None:
    """The only process that a launcher started ends as the launcher is killed."""
    (other,) = children(launcher.pid)
    try:
        launcher.kill()
        launcher.wait()
        when(lambda: not is_running(other))
    finally:
        if is_running(other):
            os.kill(other, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the signal for it is Linux's")
def test_a_process_that_holds_the_interpreters_lock_ends_with_its_launcher(tmp_path: Path) -> None:
    """torch holds it where it waits for a thread of gloo at the end of a process: no thread of Python runs then."""
    ready = tmp_path / "ready"
    child = (
        "import ctypes, pathlib; from infini.training.ranks import _end_with_launcher; _end_with_launcher(); "
        f"pathlib.Path({str(ready)!r}).touch(); ctypes.PyDLL(None).sleep(600)"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    made = subprocess.Popen([sys.executable, "-c", launcher])
    when(ready.exists)
    assert_its_process_ends(made)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks up processes in /proc")
def test_a_process_whose_launcher_is_killed_before_it_is_ready_ends(corpus: Path, tmp_path: Path) -> None:
    """It imports for seconds before it watches its parent."""
    made = start(corpus, tmp_path / "results", *TWO)
    when(lambda: children(made.pid))
    assert_its_process_ends(made)


def is_running(process: int) -> bool:
    """Whether there is a process of this number that nobody still has to wait for."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["ddp", "fsdp2"])
def test_torchrun_starts_the_processes(setup: str, straight: Path, corpus: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "infini")
    results = tmp_path / "results"
    made = start(corpus, results, f"parallel={setup}", launcher=launcher)
    said = made.communicate(timeout=200)[0]
    assert made.returncode == 0, said
    assert said.count("trained ") == 1 and said.count("record: ") == 1
    assert_equal_runs(straight, results)
    made = start(corpus, tmp_path / "other", "parallel=ddp", "parallel.devices=4", launcher=launcher)
    said = made.communicate(timeout=200)[0]
    assert "infini: error: parallel.devices=4: torchrun started 2; set this number, or leave the key out" in said


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
FORWARDED = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
LONG = ("parallel=ddp", "recipe.steps=200")


@pytest.fixture(scope="module")
def long_by_torchrun(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("torchrun") / "results"
    made = start(corpus, results, *LONG, launcher=(*TORCHRUN, "-m", "infini"))
    said = made.communicate(timeout=200)[0]
    assert made.returncode == 0, said
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("number", "more"), [(signal.SIGTERM, ()), (signal.SIGUSR1, (FORWARDED,))])
def test_a_signal_to_torchrun_saves_and_stops_all(
    number: signal.Signals, more: tuple[str, ...], corpus: Path, tmp_path: Path, long_by_torchrun: Path
) -> None:
    """Schedulers send it there. torchrun forwards the signals that it handles, and waits for its processes."""
    results = tmp_path / "results"
    launcher = (*TORCHRUN, *more, "-m", "infini")
    stopped = start(corpus, results, *LONG, launcher=launcher)
    when(lambda: list(results.glob("unfinished/*/step-*.ckpt")))
    stopped.send_signal(number)
    said = stopped.communicate(timeout=60)[0]
    assert stopped.returncode not in (0, -number), said
    (step,) = re.findall(
        r"infini: interrupted; stopped after step (\d+)\. The last good checkpoint is of step \1:", said
    )
    assert int(step) < 200 and list(results.glob(f"unfinished/*/step-{int(step):08d}-*.ckpt"))
    resumed = start(corpus, results, *LONG, launcher=launcher)
    said = resumed.communicate(timeout=200)[0]
    assert resumed.returncode == 0, said
    assert f"resuming from step {step} of 200" in said
    assert run_of(results).series["loss_curve"] == run_of(long_by_torchrun).series["loss_curve"]
    assert all(torch.equal(mine, weights(long_by_torchrun)[name]) for name, mine in weights(results).items())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "backend"),
    [(("parallel=ddp", "parallel.nodes=2"), "static"), (("parallel=fsdp2",), "static"), (("parallel=fsdp2",), "c10d")],
    ids=["ddp", "fsdp2", "fsdp2-c10d"],
)
def test_torchrun_starts_a_process_on_each_of_two_nodes(
    more: tuple[str, ...], backend: str, straight: Path, corpus: Path, tmp_path: Path
) -> None:
    """Two that this host stands for. Each node has a local rank 0; rank 0 of all alone writes. With c10d, as
    docs/how-to/cluster.md shows it, all nodes get the same command and agree on who is which."""
    results, port = tmp_path / "results", free_port()
    meets = {
        "static": ("--master-addr=127.0.0.1", f"--master-port={port}"),
        "c10d": (
            *("--rdzv-id=7", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            # The name of this host may have no address.
            "--local-addr=127.0.0.1",
        ),
    }[backend]
    nodes = [
        start(
            corpus,
            results,
            *more,
            launcher=(
                *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meets),
                *((f"--node-rank={node}",) if backend == "static" else ()),
                *("-m", "infini"),
            ),
        )
        for node in range(2)
    ]
    try:
        said = [made.communicate(timeout=200)[0] for made in nodes]
    finally:
        # A node waits for one that does not come. A node's processes end with it.
        for made in nodes:
            made.kill()
    assert [made.returncode for made in nodes] == [0, 0], said
    if backend == "c10d":
        said.sort(key=lambda text: "trained " not in text)
    assert [said[0].count(word) for word in ("trained ", "record: ")] == [1, 1]
    assert not any(word in said[1] for word in ("trained ", "record: "))
    assert_equal_runs(straight, results)
    assert run_of(results).environment["ranks"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("whom", "number"), [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGUSR2)])
def test_a_signal_to_one_process_saves_and_stops_all(
    whom: int, number: signal.Signals, corpus: Path, tmp_path: Path
) -> None:
    """The training is then the uninterrupted one bit for bit."""
    whole, results = tmp_path / "whole", tmp_path / "results"
    long = "recipe.steps=200"
    assert cli.main(command(corpus, whole, *TWO, long)) == 0
    made = start(corpus, results, *TWO, long)
    when(lambda: list(results.glob("unfinished/*/step-*.ckpt")))
    (other,) = children(made.pid)
    os.kill((made.pid, other)[whom], number)
    said = made.communicate(timeout=60)[0]
    assert made.returncode == cli.INTERRUPTED, said
    assert not Path(f"/proc/{other}").exists()
    (step,) = re.findall(
        r"infini: interrupted; stopped after step (\d+)\. The last good checkpoint is of step \1:", said
    )
    assert list(results.glob(f"unfinished/*/step-{int(step):08d}-*.ckpt"))
    assert cli.main(command(corpus, results, *TWO, long)) == 0
    assert run_of(results).series["loss_curve"] == run_of(whole).series["loss_curve"]
    assert all(torch.equal(mine, weights(whole)[name]) for name, mine in weights(results).items())
