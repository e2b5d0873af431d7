"""RMT by compiled code: the same numbers, and when it is taken. The step of other models can be compiled whole."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from command_runner import Runner
from helpers import VOCABULARY, assert_close, assert_same_state, make_model, random_ids, run_in_calls, tiny_dims
from tiny_runs import outcome, write_corpus
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import infini.training.compiled as compiled
from infini.config.compose import compose
from infini.errors import InputError
from infini.models import build_model
from infini.nn.ops.cross_entropy import IGNORE, summed_cross_entropy
from infini.nn.recurrent import Recurrence
from infini.training.activation_checkpointing import grouped
from infini.training.module import first_not_finite

N = tiny_dims().segment_length


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    """Nothing compiled before, and what a training sets is set back."""
    torch._dynamo.reset()
    kept = torch._dynamo.config.suppress_errors, torch._inductor.config.compile_threads
    yield
    torch._dynamo.config.suppress_errors, torch._inductor.config.compile_threads = kept
    torch._dynamo.reset()


def trained_once(model: Any, ids_BT: torch.Tensor) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """Hidden states, state and gradients of two calls."""
    model.zero_grad()
    hidden, state = run_in_calls(model.train(), ids_BT, [4 * N, 3 * N])
    hidden.square().sum().backward()
    return hidden, state, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("positions", ["rotary", "t5"])
def test_compiled_layers_give_what_layers_give(positions: str) -> None:
    """Outputs, state and gradients in float64; in one piece, without a break."""
    model = make_model({"name": "rmt", "positions": positions})
    ids = random_ids(3, 7 * N)
    hidden, state, gradients = trained_once(model, ids)
    counter = CompileCounter()
    assert model.compile_layers(backend=counter)
    compiled_hidden, compiled_state, compiled_gradients = trained_once(model, ids)
    assert counter.frame_count == 1
    assert_close(compiled_hidden, hidden, 1e-10, "hidden")
    assert_same_state(compiled_state, state, 1e-10)
    assert gradients.keys() == compiled_gradients.keys()
    for parameter, gradient in gradients.items():
        assert_close(compiled_gradients[parameter], gradient, 1e-10, parameter)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("infini_delta", "eager"),
        pytest.param("local", "aot_eager", marks=pytest.mark.slow),
        pytest.param("infini_linear", "aot_eager", marks=pytest.mark.slow),
        pytest.param("infini_delta", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_a_training_step_compiles_to_one_graph(name: str, backend: str) -> None:
    """Model and loss with fullgraph=True, from no state and from a carried one: losses, state and gradients of the
    plain step. aot_eager traces the backward pass, too. Masks and resets stay out: the host plans calls by them."""
    model = make_model({"name": name}, n_layers=1).train()
    counter = CompileCounterWithBackend(backend)

    def step(ids: torch.Tensor, targets: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        out = model(ids, state)
        # Chunks of 12 targets and a shorter one.
        total, count = summed_cross_entropy(out.hidden_BTD, model.output_weight, targets, 12)
        return total / count + out.aux_loss, out.state

    def run(call: Any) -> tuple[list[torch.Tensor], Any, dict[str, torch.Tensor]]:
        model.zero_grad()
        losses, state = [], None
        for number in range(2):
            ids = random_ids(2, 2 * N, seed=number)
            targets = ids.roll(-1, 1)
            targets[0, : 5 + number] = IGNORE
            loss, state = call(ids, targets, state)
            loss.backward()
            losses.append(loss.detach())
            state = state.detach()
        return losses, state, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    losses, state, gradients = run(step)
    found, found_state, found_gradients = run(torch.compile(step, fullgraph=True, dynamic=False, backend=counter))
    assert counter.frame_count == 2
    assert_close(torch.stack(found), torch.stack(losses), 1e-10, "losses")
    assert_same_state(found_state, state, 1e-10)
    assert found_gradients.keys() == gradients.keys() == dict(model.named_parameters()).keys()
    for parameter, gradient in gradients.items():
        assert_close(found_gradients[parameter], gradient, 1e-10, parameter)


def test_what_is_read_side_by_side_or_has_drawn_lengths_is_not_compiled() -> None:
    """The one has few operations, the other would be compiled for a length at a time."""
    assert not make_model({"name": "autocompressor"}).compile_layers()
    assert not make_model({"name": "autocompressor", "bptt_depth": None, "random_segments": True}).compile_layers()
    assert not make_model({"name": "rmt", "bptt_depth": 1}).compile_layers()


def test_only_training_steps_are_compiled() -> None:
    model = make_model({"name": "rmt", "positions": "t5"})
    counter = CompileCounter()
    model.compile_layers(backend=counter)
    model.eval()(random_ids(2, 3 * N))
    with torch.no_grad():
        model.train()(random_ids(2, 3 * N))
    model.checkpoint_activations = True
    model(random_ids(2, 3 * N))
    assert counter.frame_count == 0
    model.checkpoint_activations = False
    model(random_ids(2, 3 * N))
    assert counter.frame_count == 1


def test_where_a_value_is_not_finite_is_found_in_compiled_code_too() -> None:
    model = make_model({"name": "rmt"}).train()
    model.compile_layers(backend="eager")
    ids = random_ids(2, 3 * N)
    model(ids)
    model.blocks[0].feed_forward.activation.forward = lambda x: x / 0
    found = first_not_finite(model, lambda: model(ids))
    assert found == "first non-finite output: blocks.0.feed_forward.activation"


def decides(monkeypatch: pytest.MonkeyPatch, *overrides: str, missing: str | None = None) -> bool:
    """Whether a training of these settings compiles, where nothing is missing, or that."""
    monkeypatch.setattr(compiled, "_missing", lambda: missing)
    cfg = compose(["task=pg19", *overrides])
    model = build_model(cfg.model, tiny_dims(), VOCABULARY)
    made = compiled.compile_layers(cfg, model, torch.device("cpu"))
    assert made == (getattr(model, "_compiled", None) is not None)
    return made


def test_long_trainings_on_a_processor_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (f"recipe.steps={steps}" for steps in (compiled.MIN_COMPILED_STEPS - 1, compiled.MIN_COMPILED_STEPS))
    model = "model=rmt"
    assert not decides(monkeypatch, model, few) and decides(monkeypatch, model, many)
    assert decides(monkeypatch, model, few, "parallel.compile=always")
    assert not decides(monkeypatch, model, many, "parallel.compile=never")
    for when in ("auto", "always"):
        computed_again = ("recipe.checkpoint_activations=true", f"parallel.compile={when}")
        assert not decides(monkeypatch, model, many, *computed_again)
    assert not decides(monkeypatch, model, many, missing="no compiler")
    for other in ("model=local", "model=autocompressor"):
        assert not decides(monkeypatch, other, many, "parallel.compile=always")


def test_without_a_compiler_always_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "nothing++")
    cfg = compose(["task=pg19", "parallel.compile=always"])
    with pytest.raises(InputError) as raised:
        compiled.check_compiler(cfg, torch.device("cpu"))
    assert str(raised.value) == "parallel.compile='always': no C++ compiler here (nothing++); use auto or never"
    compiled.check_compiler(compose(["task=pg19"]), torch.device("cpu"))


def test_where_compiling_fails_a_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The gradients are the same, and one line reports the failure."""
    compile_with = Recurrence.compile_layers

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(Recurrence, "compile_layers", lambda self: compile_with(self, backend=broken))
    monkeypatch.setattr(compiled, "_missing", lambda: None)
    model = make_model({"name": "rmt", "positions": "t5"})
    ids = random_ids(3, 7 * N)
    _, _, wanted = trained_once(model, ids)
    assert compiled.compile_layers(compose(["task=pg19", "parallel.compile=always"]), model, torch.device("cpu"))
    monkeypatch.setattr(logging.getLogger("torch._dynamo"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)
    _, _, gradients = trained_once(model, ids)
    for parameter, gradient in wanted.items():
        assert_close(gradients[parameter], gradient, 1e-12, parameter)
    told = [entry for entry in caplog.records if entry.name == "torch._dynamo.convert_frame" and entry.levelno >= 30]
    assert told and all(entry.getMessage().startswith("parallel.compile: compilation failed") for entry in told)
    assert all("no such instruction" in entry.getMessage() and "\n" not in entry.getMessage() for entry in told)


def test_groups_of_segments_that_are_computed_again_are_compiled_too() -> None:
    model = make_model({"name": "rmt", "positions": "t5"}).train()
    ids = random_ids(3, 7 * N)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        grouped(model, 2 * N)(ids, None).hidden_BTD.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted, counter = gradients(), CompileCounter()
    model.compile_layers(backend=counter)
    found = gradients()
    assert counter.frame_count and found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_close(found[name], gradient, 1e-10, name)


def test_without_pythons_headers_nothing_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: name)
    monkeypatch.setattr(compiled.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert compiled._missing() == f"no {tmp_path}/Python.h here, which compiled code needs"
    (tmp_path / "Python.h").touch()
    assert compiled._missing() is None


@pytest.mark.slow
def test_a_compiled_training_is_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The installed compiler gives the command the same losses as without, and the same bits a second time."""
    if compiled._missing():
        pytest.skip(str(compiled._missing()))
    corpus = write_corpus(tmp_path / "corpus")
    curves = []
    for number, when in enumerate(("never", "always", "always")):
        run = Runner(corpus, tmp_path / str(number), capfd)
        run("train", "task=pg19", "model=rmt", "recipe.steps=20", f"parallel.compile={when}")
        assert ("its layers are compiled" in run.err) == (when == "always")
        assert run.records()[0].environment["compiled"] == (when == "always")
        curves.append(outcome(run.results))
    assert curves[1] == curves[2]
    losses = torch.tensor([curve[0] for curve in curves])[..., 1]
    assert_close(losses[1], losses[0], 1e-4, "loss")
