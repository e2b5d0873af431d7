"""Helpers of several test files: errors, tiny models, and the oracle run through a layer's own weights."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import importlib.util
import itertools
import shutil
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import infini.conf
from infini.models import build_model, registered
from infini.models.compressive import CompressiveAttention
from infini.models.infini_xl import InfiniXLAttention
from infini.models.memorizing import MemorizingAttention
from infini.models.transformer_xl import XLAttention
from infini.nn.attention import InfiniAttention, LocalAttention
from infini.nn.decoder import Decoder
from infini.nn.ops import reference
from infini.nn.state import leaves

# Rounding of the dtype times the length of the sums, with an order of magnitude to spare; the same on every machine.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
BFLOAT16_ROUNDING = 2.0**-9
"""The largest relative error of one rounding to bfloat16."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCABULARY = 31
ARITHMETIC = ("first_segment", "positions", "compression")
"""Options of which every value is tried."""
SEGMENT = 8


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||, in float64; ||a|| where b is 0."""
    a, b = a.detach().double(), b.detach().double()
    assert a.shape == b.shape
    size = b.norm().item()
    return (a - b).norm().item() / (size if size else 1.0)


def assert_close(a: torch.Tensor, b: torch.Tensor, tolerance: float, what: str) -> None:
    """relative_error(a, b) <= tolerance, and says which tensor is off (a NaN is)."""
    error = relative_error(a, b)
    assert error <= tolerance, f"{what}: error {error:.2e} > {tolerance:.0e}"


def assert_same_state(a: Any, b: Any, tolerance: float) -> None:
    """Two states hold the same leaves; integers exactly."""
    for (path, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
        if x.dtype.is_floating_point:
            assert_close(x, y, tolerance, path)
        else:
            assert torch.equal(x, y), f"{path}: {x.tolist()}, expected {y.tolist()}"


def assert_on(state: Any, device: str) -> None:
    """The numbers of a state's layers are on a device of this type, its clock and its counters on the host."""
    for path, leaf in leaves(state):
        numbers = leaf.is_floating_point() and not path.startswith("clock.")
        assert leaf.device.type == (device if numbers else "cpu"), path


def bools(rows: list[list[int]]) -> torch.Tensor:
    """A mask [B, T] from zeros and ones."""
    return torch.tensor(rows, dtype=torch.bool)


def marks(n_rows: int, n_tokens: int, *columns: int) -> torch.Tensor:
    """A mask [B, T], true at the named columns of every row."""
    mask = torch.zeros(n_rows, n_tokens, dtype=torch.bool)
    mask[:, list(columns)] = True
    return mask


@contextlib.contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Autocast for bfloat16, nothing otherwise."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        yield


def make_layer(d_model: int = 12, n_heads: int = 2, d_key: int = 6, segment: int = SEGMENT, **options: Any) -> Any:
    """An InfiniAttention in float64 with weights and gates of ordinary size, exact in float32."""
    torch.manual_seed(0)
    layer = InfiniAttention(d_model, n_heads, d_key, segment, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 1.0)
    return layer.double()


def oracle_layer(
    layer: InfiniAttention, x_BTD: torch.Tensor, **call: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, M and z that the oracle gives for a layer's weights from an empty memory."""

    def heads(projection: nn.Linear, size: int) -> torch.Tensor:
        return (x_BTD @ projection.weight.T).unflatten(-1, (-1, size))

    a_BTHV, m, z = reference.infini_attention(
        heads(layer.q_proj, layer.d_key),
        heads(layer.k_proj, layer.d_key),
        heads(layer.v_proj, layer.d_value),
        layer.beta,
        segment_length=layer.segment_length,
        update_rule=layer.update_rule,
        first_segment=layer.first_segment,
        rope_base=layer.rope_base,
        bias_HN=by_distance(layer),
        decay_G=None if layer.decay is None else torch.sigmoid(layer.decay),
        input_weight_GK=layer.input_weight,
        input_bias_G=layer.input_bias,
        **call,
    )
    return a_BTHV.flatten(2) @ layer.o_proj.weight.T, m, z


def bucket_of(distance: int) -> int:
    """Raffel et al. 2020, for 32 buckets and distances up to 128: by comparing powers, not logarithms."""
    if distance < 16:
        return distance
    # The bucket b >= 16 begins where (d / 16)^16 >= 8^(b - 16).
    return min(31, max(b for b in range(16, 64) if distance**16 >= 16**16 * 8 ** (b - 16)))


def by_distance(layer: Any) -> torch.Tensor | None:
    """T5's biases of a layer by head and distance; None where it has rotary positions."""
    if layer.positions == "rotary":
        return None
    table = layer.bucket_bias.view(32, layer.n_heads)
    return torch.stack([table[bucket_of(distance)] for distance in range(layer.segment_length)], 1)


def show_heads(layer: Any) -> Any:
    """The layer with o_proj = identity (n_heads * d_value must be d_model): its output is the heads side by side."""
    with torch.no_grad():
        layer.o_proj.weight.copy_(torch.eye(layer.d_model))
    return layer


def set_gates(layer: Any, value: float) -> Any:
    """The layer with all its gates at sigmoid(value); at 40 only the memory speaks, at -800 only local attention."""
    with torch.no_grad():
        layer.beta.fill_(value)
    return layer


def tiny_dims(**changes: Any) -> SimpleNamespace:
    """Dimensions of a model that runs in milliseconds."""
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": None, "d_key": 6, "d_value": 4, "d_ff": 24}
    return SimpleNamespace(**{**sizes, "segment_length": SEGMENT, **changes})


LLM_VARIANTS: list[dict[str, Any]] = [
    {},
    {"update_rule": "linear", "window": "previous", "sinks": 1},
    {"memory": "none"},
    {"memory": "none", "window": "previous"},
]
"""Options of `llm` that change its arithmetic. Its controls with keys and values of everything grow:
test_llm_language_model.py."""


@functools.cache
def tiny_llm_folder(vocabulary: int = VOCABULARY) -> str:
    """A folder with a tiny Llama of so many tokens, as wide as tiny_dims say."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                # Fresh weights are too small for attention to matter.
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    folder = tempfile.mkdtemp(prefix="infini-tiny-llm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    return folder


class _ExactNorm(nn.Module):
    """A norm of transformers in the dtype of its input; transformers' computes in float32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def with_exact_norms(model: Any) -> Any:
    """The model with norms that do not round float64 to float32, so that tolerances are those of other models."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, _ExactNorm(child))
    return model


def one_in(n: int, cases: Iterable[Any], name: Callable[..., str] | None = None) -> list[Any]:
    """Cases as parameters of a test, tuples as several. The first of every n is tried by default, the others are slow
    tests. name: makes an id of the parameters."""
    made = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marks = () if number % n == 0 else pytest.mark.slow
        made.append(pytest.param(*values, marks=marks, id=None if name is None else name(*values)))
    return made


def models_by(n: int, made: Iterable[dict[str, Any]], name: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    """A test of every model (`options`) with values of another argument, one pair in n by default. Every model has one
    by default if there are n values or more."""
    pairs = itertools.product(made, values)
    return pytest.mark.parametrize(
        ("options", name), one_in(n, pairs, lambda model, value: f"{variant_id(model)}-{value}")
    )


def variants() -> list[dict[str, Any]]:
    """Every registered model as its YAML ships it, once for each value of the options that change its arithmetic."""
    return copy.deepcopy(_variants())


@functools.cache
def _variants() -> list[dict[str, Any]]:
    conf = Path(infini.conf.__file__).parent / "model"
    found = []
    for name, (config, _) in sorted(registered("language_model").items()):
        options = {**yaml.safe_load((conf / f"{name}.yaml").read_text()), "name": name}
        hints = typing.get_type_hints(config)
        # Options that follow the recipe are small here.
        options |= {key: 2 for key, value in options.items() if str(value).startswith("${")}
        made = [options]
        if name == "llm":
            if importlib.util.find_spec("transformers") is None:
                continue
            options |= {"base": tiny_llm_folder(), "gate_init": -0.5}
            made = [{**options, **changes} for changes in LLM_VARIANTS]
        for key in ARITHMETIC:
            if key in hints:
                made = [{**each, key: value} for each in made for value in typing.get_args(hints[key])]
        if "memory_decay" in hints:
            made.append({**made[0], "memory_decay": 100.0})
            made.append({**made[0], "input_gate": "sigmoid"})
        found += made
    return found


def with_memory() -> list[dict[str, Any]]:
    """The variants that have a compressive memory and read it."""
    return [options for options in variants() if "update_rule" in options and options.get("memory") != "none"]


def variant_id(options: dict[str, Any]) -> str:
    """The test id of a variant."""
    of_llm = ("memory", "update_rule", "window") if options["name"] == "llm" else ()
    named = [str(options[key]) for key in ("name", *of_llm, *ARITHMETIC) if key in options]
    added = {"decay": "memory_decay", "input": "input_gate"}
    return "-".join([*named, *(word for word, key in added.items() if options.get(key))])


LAYERS: dict[str, Callable[..., LocalAttention]] = {
    "local": LocalAttention,
    "linear": functools.partial(InfiniAttention, update_rule="linear"),
    "delta": functools.partial(InfiniAttention, update_rule="delta"),
    "xl": functools.partial(XLAttention, positions="t5"),
    "dai2019": XLAttention,
    "infini_xl": InfiniXLAttention,
    "memorizing": functools.partial(MemorizingAttention, memory_segments=2, neighbours=4),
    "compressive": CompressiveAttention,
}
"""Kinds of layers that a decoder can be mixed from."""


def mixed(*layers: str) -> dict[str, Any]:
    """The options with which make_model builds a decoder of these layers, the first one at the bottom."""
    return {"name": "-".join(layers), "layers": layers}


def mixed_decoder(layers: Sequence[str], dims: Any) -> Decoder:
    """A decoder with a layer of each of these kinds, the first one at the bottom."""

    def attention(layer: int) -> LocalAttention:
        sizes = (dims.d_model, dims.n_heads, dims.d_key, dims.segment_length)
        return LAYERS[layers[layer]](*sizes, d_value=dims.d_value, n_kv_heads=dims.n_kv_heads)

    dims.n_layers = len(layers)
    return Decoder(dims, VOCABULARY, attention)


def make_model(options: dict[str, Any], dtype: torch.dtype = torch.float64, **dims: Any) -> Any:
    """A tiny model whose norms and gates are not at their initial values."""
    torch.manual_seed(0)
    sizes = tiny_dims(**dims)
    # Those of `llm` are the numbers of the layers with a memory.
    layers = None if options["name"] == "llm" else options.get("layers")
    model: Any = build_model(options, sizes, VOCABULARY) if layers is None else mixed_decoder(layers, sizes)
    if options["name"] == "llm" and dtype == torch.float64:
        with_exact_norms(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("input_weight"):
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return model.to(dtype).eval()


def random_ids(n_rows: int, n_tokens: int, seed: int = 1) -> torch.Tensor:
    """Token ids [B, T]."""
    return torch.randint(VOCABULARY, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


def run_in_calls(model: Any, ids_BT: torch.Tensor, lengths: list[int], state: Any = None, **extras: Any) -> Any:
    """Hidden states and state after calls of these lengths (the last one repeated to the end)."""
    hidden, start, n = [], 0, 0
    while start < ids_BT.shape[1]:
        columns = slice(start, start + lengths[min(n, len(lengths) - 1)])
        out = model(ids_BT[:, columns], state, **{name: extra[:, columns] for name, extra in extras.items()})
        hidden.append(out.hidden_BTD)
        state, start, n = out.state, columns.stop, n + 1
    return torch.cat(hidden, 1), state


def layer_in_calls(layer: Any, x_TD: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, Any]:
    """Outputs [T, D] of a layer for one row and its state, after calls of these lengths (the last one repeated)."""
    parts, start, n, state = [], 0, 0, None
    while start < len(x_TD):
        stop = start + lengths[min(n, len(lengths) - 1)]
        y, state = layer(x_TD[None, start:stop], state)
        parts.append(y[0])
        start, n = stop, n + 1
    return torch.cat(parts), state


def assert_same_gradients(
    got: torch.Tensor, expected: torch.Tensor, of: dict[str, torch.Tensor], tolerance: float = 1e-11
) -> None:
    """Two computations of one thing have the same gradients, of a random weighting of their outputs."""
    probe = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad((y * probe).sum(), list(of.values())) for y in (got, expected))
    for name, a, b in zip(of, ours, theirs, strict=True):
        assert_close(a, b, tolerance, name)
