"""Decoders whose layers differ: every layer counts in what the decoder declares, is trained with and is measured by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    SEGMENT,
    VOCABULARY,
    assert_close,
    assert_same_state,
    by_distance,
    make_model,
    mixed,
    oracle_layer,
    random_ids,
    tiny_dims,
    variant_id,
)

from infini.config.compose import compose
from infini.evaluation.dilution import half_dilution
from infini.evaluation.perplexity import stream_documents, stream_with_foreign_memory
from infini.nn.attention import InfiniAttention, LocalAttention
from infini.nn.decoder import Decoder
from infini.nn.ops import reference
from infini.nn.protocols import recorded
from infini.nn.state import is_memory, leaves, memory_floats, scale_memory
from infini.training.additions import length_extension, long_history
from infini.training.additions.length_extension import extended_call, extended_in_two_calls
from infini.training.additions.sparse_writes import penalty
from infini.training.module import LanguageModelModule

WITH_SUM = [
    mixed("local", "linear"),
    mixed("local", "local", "delta"),
    mixed("delta", "local"),
    mixed("linear", "delta"),
    mixed("xl", "linear"),
    mixed("dai2019", "delta", "xl"),
    mixed("linear", "infini_xl"),
    mixed("infini_xl", "local", "delta"),
    mixed("compressive", "memorizing", "linear"),
]
"""Models with a memory that is a sum over tokens in at least one layer."""
WITHOUT_SUM = [mixed("local", "xl"), mixed("local", "memorizing"), mixed("compressive", "local")]
DECODERS = pytest.mark.parametrize("options", WITH_SUM, ids=variant_id)


def oracle_block(attention: Any, x_BTD: torch.Tensor) -> torch.Tensor:
    """A layer's output as the paper writes it, from its weights; see infini.nn.ops.reference."""
    if type(attention) is InfiniAttention:
        return oracle_layer(attention, x_BTD)[0]
    assert type(attention) is LocalAttention

    def heads(projection: Any, size: int) -> torch.Tensor:
        return (x_BTD @ projection.weight.T).unflatten(-1, (-1, size))

    q, k, v = (
        heads(projection, size)
        for projection, size in (
            (attention.q_proj, attention.d_key),
            (attention.k_proj, attention.d_key),
            (attention.v_proj, attention.d_value),
        )
    )
    rows = []
    for b in range(len(x_BTD)):
        segments = []
        for start in range(0, x_BTD.shape[1], attention.segment_length):
            at = slice(start, start + attention.segment_length)
            shared = attention.n_heads // attention.n_kv_heads
            a = [
                reference.dot_product_attention(
                    q[b, at, h],
                    k[b, at, h // shared],
                    v[b, at, h // shared],
                    1 / math.sqrt(attention.d_key),
                    attention.rope_base,
                    None if (bias := by_distance(attention)) is None else bias[h],
                )
                for h in range(attention.n_heads)
            ]
            segments.append(torch.stack(a, 1))
        rows.append(torch.cat(segments))
    return torch.stack(rows).flatten(2) @ attention.o_proj.weight.T


def oracle_decoder(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Final hidden states with every layer computed by the oracle."""
    x = model.embedding(ids_BT)
    for block in model.blocks:
        x = x + oracle_block(block.attention, block.attention_norm(x))
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return model.norm(x)


@pytest.mark.parametrize("n_kv_heads", [None, 1])
@pytest.mark.parametrize(
    "layers", [("local", "linear"), ("delta", "local"), ("linear", "local", "delta")], ids="-".join
)
def test_outputs_are_the_oracles(layers: tuple[str, ...], n_kv_heads: int | None) -> None:
    """Outputs and gradients are compared, with key-value heads of their own or shared."""
    model = make_model(mixed(*layers), n_kv_heads=n_kv_heads)
    ids = random_ids(2, 3 * SEGMENT + 3)
    got, expected = model(ids).hidden_BTD, oracle_decoder(model, ids)
    assert_close(got, expected, 1e-12, "hidden")
    probe = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(3))
    weights = [p for name, p in model.named_parameters() if not name.startswith("unembedding")]
    ours, theirs = (torch.autograd.grad((hidden * probe).sum(), weights) for hidden in (got, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, 1e-10, "gradient")


@DECODERS
def test_any_layer_with_a_memory_counts(options: dict[str, Any]) -> None:
    model = make_model(options)
    assert model.memory_layers and model.memory_is_a_sum
    expected = [kind in ("linear", "delta", "infini_xl") for kind in options["layers"]]
    assert [isinstance(layer, InfiniAttention) for layer in model.attentions()] == expected
    assert model.memory_layers == [layer for layer in model.attentions() if isinstance(layer, InfiniAttention)]


@pytest.mark.parametrize("options", WITHOUT_SUM, ids=variant_id)
def test_no_layer_with_a_compressive_memory_is_none(options: dict[str, Any]) -> None:
    model = make_model(options)
    assert model.memory_layers == [] and not model.memory_is_a_sum


@pytest.mark.parametrize("options", [*WITH_SUM, *WITHOUT_SUM], ids=variant_id)
def test_what_is_declared_is_what_is_measured(options: dict[str, Any]) -> None:
    """State, gates and reach, of decoders of which no layer stands for the others."""
    model = make_model(options)
    ids = random_ids(1, 5 * SEGMENT)
    out = model(ids)
    assert memory_floats(out.state) == model.state_floats(5)
    gated = [kind for kind in options["layers"] if kind in ("linear", "delta", "infini_xl", "memorizing")]
    gates = model.gates()
    assert gates == [
        torch.sigmoid(layer.beta).tolist() for layer in model.attentions() if getattr(layer, "beta", None) is not None
    ] or (gates is None and not gated)
    assert len(gates or []) == len(gated)
    field = model.receptive_field(5)
    for back, moves in ((field, True), (field + 1, False)):
        if back > ids.shape[1]:
            continue
        other = ids.clone()
        other[0, -back] = (other[0, -back] + 1) % VOCABULARY
        assert torch.equal(model(other).hidden_BTD[:, -SEGMENT:], out.hidden_BTD[:, -SEGMENT:]) != moves


class OneSegmentBack(LocalAttention):
    """Adds to each token the first of the segment before, gradient and all."""

    gradient_horizon = 1
    look_back = 1

    def attend(self, x_BTD: torch.Tensor, leaves: Any, grid: Any) -> tuple[torch.Tensor, Any]:
        y_BTD, leaves = super().attend(x_BTD, leaves, grid)
        heads = x_BTD.unflatten(1, (-1, self.segment_length))[:, :, :1]
        before = F.pad(heads, (0, 0, 0, 0, 1, -1)).expand(-1, -1, self.segment_length, -1)
        return y_BTD + before.flatten(1, 2), leaves


@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_horizons_add_up_from_layer_to_layer(n_layers: int) -> None:
    """A gradient goes as far as all layers together carry it, as information does."""
    dims = tiny_dims(n_layers=n_layers)
    torch.manual_seed(0)
    model = Decoder(dims, VOCABULARY, lambda layer: OneSegmentBack(dims.d_model, 2, 6, SEGMENT))
    S = 5
    ids = (3 * torch.arange(S).repeat_interleave(SEGMENT) + torch.arange(S * SEGMENT) % 3)[None]
    model(ids).hidden_BTD[:, -1].square().sum().backward()
    assert model.embedding.weight.grad is not None and model.gradient_horizon == n_layers
    reached = model.embedding.weight.grad[: 3 * S].unflatten(0, (S, 3)).abs().amax((1, 2)) > 0
    assert reached.tolist() == [S - 1 - s <= n_layers for s in range(S)]
    assert model.receptive_field(S) == (n_layers + 1) * SEGMENT


def test_layers_share_one_segment_length() -> None:
    """They stand on one grid."""
    dims = tiny_dims()

    def attention(layer: int) -> LocalAttention:
        return LocalAttention(dims.d_model, dims.n_heads, dims.d_key, SEGMENT * (layer + 1))

    with pytest.raises(ValueError, match=r"segment_length: layers have 8, 16; all must have the same"):
        Decoder(dims, VOCABULARY, attention)


@pytest.mark.parametrize("layers", [("local", "linear"), ("local", "local", "xl")], ids="-".join)
def test_a_reset_inside_a_segment_is_refused_by_any_layer_with_a_memory(layers: tuple[str, ...]) -> None:
    model = make_model(mixed(*layers))
    reset = torch.zeros(1, 2 * SEGMENT, dtype=torch.bool)
    reset[0, 3] = True
    with pytest.raises(ValueError, match="a reset inside a segment of 8 tokens"):
        model(random_ids(1, 2 * SEGMENT), reset_BT=reset)


# Training with what recipes add.


@DECODERS
@pytest.mark.parametrize("begun", [False, True], ids=["fresh", "begun"])
def test_sums_are_scaled_in_every_layer_that_has_one(options: dict[str, Any], begun: bool) -> None:
    """One call with the factor is two with the memory scaled between them: outputs, and all that is carried."""
    model = make_model(options)
    factor = torch.tensor([50.0, 4000.0], dtype=torch.float64)
    ids, cut = random_ids(2, 4 * SEGMENT + 3), 2 * SEGMENT
    state = model(random_ids(2, 3 * SEGMENT, seed=3)).state if begun else None
    one = extended_call(model, ids, state, None, None, cut, factor)
    first = model(ids[:, :cut], state)
    second = model(ids[:, cut:], scale_memory(first.state, factor))
    assert_close(one.hidden_BTD, torch.cat([first.hidden_BTD, second.hidden_BTD], 1), 1e-9, "hidden")
    assert_same_state(one.state.layers, second.state.layers, 1e-9)
    carried = extended_in_two_calls(model, ids, state, None, None, cut, factor, carry=True)
    assert_close(carried.hidden_BTD, one.hidden_BTD, 1e-9, "hidden")
    assert_same_state(carried.state, model(ids, state).state, 1e-10)
    assert (one.hidden_BTD - model(ids, state).hidden_BTD).abs().max() > 1e-6


def test_only_sums_are_scaled() -> None:
    """In a layer with a cache and a memory, only the memory is scaled; other memories are not scaled."""
    model = make_model(mixed("xl", "infini_xl", "memorizing", "compressive", "linear"))
    state = model(random_ids(2, 3 * SEGMENT + 3)).state
    scaled = scale_memory(state, torch.tensor([1.0, 10.0]))
    kinds = set()
    for (path, before), (_, after) in zip(leaves(state), leaves(scaled), strict=True):
        is_sum = path.endswith(("m_BGKV", "z_BGK"))
        kinds.add((is_memory(path), is_sum))
        assert torch.equal(before[0], after[0]), path
        assert torch.allclose(before[1] * (10 if is_sum else 1), after[1], rtol=1e-12, atol=0), path
    assert kinds == {(False, False), (True, False), (True, True)}


def module(options: dict[str, Any], *overrides: str, carry_state: bool = False) -> LanguageModelModule:
    cfg = compose(["task=passkey", "recipe.curriculum=null", *overrides])
    made = LanguageModelModule(make_model(options).train(), cfg.optimizer, cfg.recipe, carry_state, cfg.seed)
    made.log = lambda *_, **__: None  # type: ignore[method-assign]
    return made


SEGMENTS = 8
"""The segments of a sequence. Those after the boundary of an extension are diluted from the second one on."""


def batch(**more: Any) -> dict[str, Any]:
    ids = random_ids(4, SEGMENTS * SEGMENT, seed=3)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return {"ids_BT": ids, "targets_BT": ids.roll(-1, 1), "mask_BT": mask, "reset_BT": ~mask, **more}


PLAIN = (
    "recipe.length_extension=null",
    "recipe.long_history=null",
    "recipe.sparse_writes=null",
)
ADDITIONS = {
    "length_extension": ("recipe.length_extension=1000", "recipe.length_extension_share=1"),
    "long_history": ("recipe.length_extension=1000", "recipe.length_extension_share=0", "recipe.long_history=[3,9]"),
    "sparse_writes": ("recipe.sparse_writes=0.5",),
}


@DECODERS
@pytest.mark.parametrize("added", ADDITIONS)
def test_what_a_recipe_adds_reaches_the_training(options: dict[str, Any], added: str) -> None:
    more = {"history_PT": random_ids(3, 3 * SEGMENT)} if added == "long_history" else {}
    plain = module(options, *PLAIN).training_step(batch(), 0)
    made = module(options, *PLAIN, *ADDITIONS[added])
    loss = made.training_step(batch(**more), 0)
    assert abs(loss.item() - plain.item()) > 1e-5
    loss.backward()
    assert all(p.grad.isfinite().all() for p in made.model.parameters() if p.grad is not None)


@pytest.mark.parametrize("options", WITHOUT_SUM, ids=variant_id)
@pytest.mark.parametrize("added", ADDITIONS)
def test_what_a_recipe_adds_leaves_other_models_alone(options: dict[str, Any], added: str) -> None:
    more = {"history_PT": random_ids(3, 3 * SEGMENT)} if added == "long_history" else {}
    losses = [
        module(options, *PLAIN, *extra).training_step(batch(**more), 0).item() for extra in ((), ADDITIONS[added])
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("options", [mixed("linear"), mixed("local", "delta"), mixed("infini_xl", "dai2019")])
def test_additions_go_together(options: dict[str, Any]) -> None:
    """Carried states included, where a part of a sequence is read twice: only one reading pays for its writes."""
    both = (*PLAIN, *ADDITIONS["length_extension"], *ADDITIONS["sparse_writes"])
    for carry_state, extra in itertools.product((False, True), ((), ("recipe.checkpoint_activations=true",))):
        made, alone = (module(options, *words, *extra, carry_state=carry_state) for words in (both, both[:-1]))
        for one in (made, alone):
            one.model.checkpoint_activations = bool(extra)
            one.carried = one.model.init_state(4)
        loss, without = (one.training_step(batch(), 0) for one in (made, alone))
        drawn = np.random.default_rng([made.seed, 3, 0])
        drawn.random()
        boundary, factor_B = length_extension.draw(drawn, 4, SEGMENTS, 1000.0)
        call: Callable[..., Any] = extended_in_two_calls if carry_state else extended_call
        asked = batch()
        if made.model.memory_is_a_sum:
            with recorded(made.model, "keys") as keys:
                call(made.model, asked["ids_BT"], made.model.init_state(4), None, None, boundary * SEGMENT, factor_B)
        else:
            with recorded(made.model, "keys") as keys:
                made.model(asked["ids_BT"], made.model.init_state(4))
        paid = penalty(made.model, [k[:, : SEGMENTS * SEGMENT] for k in keys], asked["mask_BT"])
        assert loss.item() - without.item() == pytest.approx(0.5 * paid.item(), rel=1e-6)
        loss.backward()


@DECODERS
def test_a_history_is_a_state_of_the_decoder(options: dict[str, Any]) -> None:
    """A memory that is no sum stays as reading leaves it: the state fits a row of any other."""
    model = make_model(options)
    histories = long_history.read_histories(model, random_ids(3, 3 * SEGMENT))
    made = long_history.sample_initial_states(model.init_state(6), histories, np.random.default_rng(0))
    out = model(random_ids(6, SEGMENT), made)
    assert out.hidden_BTD.isfinite().all()
    assert memory_floats(out.state) == model.state_floats(1)


@DECODERS
def test_writes_are_recorded_of_the_layers_that_write(options: dict[str, Any]) -> None:
    """The penalty is the mean over these; other projections, of whatever shape, are not in it."""
    model = make_model(options)
    ids = random_ids(2, 2 * SEGMENT + 3)
    with recorded(model, "keys") as keys:
        state = model(ids[:, :5]).state
        model(ids[:, 5:], state)
    assert [k.shape for k in keys] == [(2, ids.shape[1], 2 * 6)] * len(model.memory_layers)
    found = penalty(model, keys, torch.ones(ids.shape, dtype=torch.bool))
    total = weight = torch.zeros((), dtype=torch.float64)
    for layer, k in zip(model.memory_layers, keys, strict=True):
        g = torch.sigmoid(layer.beta)
        written = reference.sigma(k.unflatten(-1, (2, 6))).mean(-1).log().mean((0, 1))
        total, weight = total + (written * g).sum(), weight + g.sum()
    assert found.item() == pytest.approx((total / weight).item(), rel=1e-9)


# Evaluation.


class Documents:
    def __init__(self, *lengths: int) -> None:
        self.n_tokens = np.array(lengths)

    def ids(self, index: int) -> np.ndarray:
        return random_ids(1, int(self.n_tokens[index]), seed=index)[0].numpy()


@DECODERS
def test_knock_outs_take_every_memory_away(options: dict[str, Any]) -> None:
    """Reset every segment, a document is read as segments apart; with another's memory it is read otherwise."""
    model = make_model(options).float()
    books = Documents(5 * SEGMENT, 4 * SEGMENT + 3)
    plain = stream_documents(model, books, 0, tokens_per_call=2 * SEGMENT)
    reset = stream_documents(model, books, 0, tokens_per_call=2 * SEGMENT, reset_every=SEGMENT)
    own, foreign = stream_with_foreign_memory(model, books, 0)
    shared = 4 * SEGMENT + 3
    assert own.tokens.tolist() == foreign.tokens.tolist() == [shared, shared]
    assert own.nll[1] == pytest.approx(plain.nll[1], rel=1e-5)
    assert abs(own.nll - foreign.nll).min() > 1e-4 and abs(reset.nll - plain.nll).min() > 1e-4
    layers = [layer for layer in model.attentions() if isinstance(layer, InfiniAttention)]
    assert np.array(own.growth).shape == (len(layers), 2)


@DECODERS
def test_half_dilution_is_measured_in_the_layers_with_a_memory(options: dict[str, Any]) -> None:
    """Whether their projections are called once a call or once a piece, by what each layer was given."""
    model = make_model(options, n_kv_heads=1)
    ids = random_ids(2, 4 * SEGMENT + 3)
    needle, filler, query = (torch.zeros(ids.shape, dtype=torch.bool) for _ in range(3))
    needle[:, 2:5] = True
    filler[:, SEGMENT : 3 * SEGMENT] = True
    query[:, -2:] = True
    found = half_dilution(model, ids, needle, filler, query)
    inputs: list[torch.Tensor] = []
    hooks = [
        block.attention_norm.register_forward_hook(lambda *call: inputs.append(call[-1])) for block in model.blocks
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    expected = []
    for layer, x in zip(model.attentions(), inputs, strict=True):
        if not isinstance(layer, InfiniAttention):
            continue
        sq = reference.sigma(layer.q_proj(x).unflatten(-1, (2, 6)))
        sk = reference.sigma(layer.k_proj(x))
        ratios = torch.stack(
            [
                torch.einsum("qhk,tk->qh", sq[row, -2:], sk[row, 2:5])
                / (torch.einsum("qhk,tk->qh", sq[row, -2:], sk[row, SEGMENT : 3 * SEGMENT]) / (2 * SEGMENT))
                for row in range(2)
            ]
        )
        expected.append(ratios.flatten(0, 1).median(0).values.tolist())
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("options", WITHOUT_SUM, ids=variant_id)
def test_half_dilution_without_a_memory_is_empty(options: dict[str, Any]) -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert half_dilution(make_model(options), random_ids(1, 4), mask, mask, mask) == []


def test_layers_of_different_sizes() -> None:
    """Other numbers of heads, sizes of keys and values, and positions: whatever is measured by head has those of each
    layer."""
    sizes: list[dict[str, Any]] = [
        {"n_heads": 4, "d_key": 4, "n_kv_heads": 2, "d_value": 3, "positions": "t5"},
        {"n_heads": 2, "d_key": 6, "n_kv_heads": 1, "update_rule": "delta"},
        {"n_heads": 3, "d_key": 2, "d_value": 5},
    ]
    dims = tiny_dims(n_layers=3)

    def attention(layer: int) -> InfiniAttention:
        own = dict(sizes[layer])
        return InfiniAttention(dims.d_model, own.pop("n_heads"), own.pop("d_key"), SEGMENT, **own)

    torch.manual_seed(0)
    model: Any = Decoder(dims, VOCABULARY, attention).double().eval()
    ids = random_ids(2, 4 * SEGMENT + 3)
    out = model(ids)
    assert_close(out.hidden_BTD, oracle_decoder(model, ids), 1e-12, "hidden")
    assert memory_floats(out.state) == model.state_floats(4) == 2 * 4 * 4 + 6 * 7 + 3 * 2 * 6
    assert [len(layer) for layer in model.gates()] == [4, 2, 3]
    masks = [torch.zeros(ids.shape, dtype=torch.bool) for _ in range(3)]
    for mask, columns in zip(masks, (slice(2, 5), slice(SEGMENT, 2 * SEGMENT), slice(-2, None)), strict=True):
        mask[:, columns] = True
    assert [len(layer) for layer in half_dilution(model, ids, *masks)] == [4, 2, 3]
    with recorded(model, "keys") as keys:
        model(ids)
    assert penalty(model, keys, torch.ones(ids.shape, dtype=torch.bool)).isfinite()
    own, _ = stream_with_foreign_memory(model.float(), Documents(5 * SEGMENT, 4 * SEGMENT), 0)
    assert [len(layer) for layer in own.growth] == [2, 1, 3] and all(v > 0 for layer in own.growth for v in layer)
