"""Unlimiformer: windows, the k best states a head, and full cross-attention where k is all of them."""

from __future__ import annotations

import copy
import itertools
import sys
from typing import Any

import pytest
import torch

from infini.errors import InputError
from infini.pretrained.unlimiformer import StateIndex, UnlimiformerAttention, _kth_largest, encode, extend, windows

transformers = pytest.importorskip("transformers")
from transformers.modeling_outputs import BaseModelOutput  # noqa: E402 - only where the library is

S = 50
"""Encoder states."""


@pytest.mark.parametrize("n_tokens", [1, 7, 8, 9, 12, 13, 40, 41])
def test_windows_keep_every_token_once_and_never_their_edges(n_tokens: int) -> None:
    found = windows(n_tokens, 8)
    kept = [token for window in found for token in range(window.keep_start, window.keep_stop)]
    assert kept == list(range(n_tokens))
    assert all(window.stop - window.start == min(8, n_tokens) for window in found)
    for before, window in itertools.pairwise(found):
        # A quarter of the window on either side of what is kept, but for the input's ends.
        assert window.keep_start - window.start >= 2 and before.stop - before.keep_stop >= 2


def test_without_its_package_the_approximate_search_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    states, tokens, _ = states_and_tokens()
    model = extend(make("bart"), 7, "approximate")
    with pytest.raises(InputError, match="model.search='approximate': needs the package faiss-cpu; or take exact"):
        logits(model, states, tokens[:, :1])


def test_a_window_of_odd_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size=7"):
        windows(10, 7)


def make(kind: str, attention: str = "sdpa") -> Any:
    """A small model with weights that matter, in float64."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    sizes |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    if kind == "bart":
        config: Any = transformers.BartConfig(**sizes, max_position_embeddings=64, attn_implementation=attention)
        model: Any = transformers.BartForConditionalGeneration(config)
    else:
        config = transformers.LEDConfig(
            **sizes, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=8
        )
        model = transformers.LEDForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.double().eval()


def states_and_tokens(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(rows, S, 16, generator=generator, dtype=torch.float64)
    tokens = torch.randint(3, 60, (rows, 9), generator=generator)
    mask = torch.ones(rows, S, dtype=torch.long)
    mask[-1, 30:] = 0
    return states, tokens, mask


def logits(model: Any, states: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    out = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=states), attention_mask=mask, decoder_input_ids=tokens
    )
    found: torch.Tensor = out.logits
    return found


def step_by_step(model: Any, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of each token from a call of its own, with the model's own cache."""
    cache, found = None, []
    for t in range(tokens.shape[1]):
        out = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            decoder_input_ids=tokens[:, t : t + 1],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        found.append(out.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("k", [S, 10 * S])
@pytest.mark.parametrize("kind", ["bart", "led"])
def test_with_all_states_it_is_full_cross_attention(kind: str, k: int, masked: bool) -> None:
    model = make(kind)
    states, tokens, mask = states_and_tokens()
    plain = logits(model, states, tokens, mask if masked else None)
    extended = extend(copy.deepcopy(model), k)
    ours = logits(extended, states, tokens, mask if masked else None)
    assert (ours - plain).abs().max() < 1e-10
    assert extended.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("kind", ["bart", "led"])
def test_attention_dropout_is_the_layers_own(kind: str) -> None:
    """The same draws leave out the same weights of one cross-attention, and the bias of the values with them."""
    model = make(kind, "eager").train()
    base = model.get_decoder().layers[0].encoder_attn
    base.dropout = 0.5
    states, _, _ = states_and_tokens()
    hidden = torch.randn(2, 9, 16, dtype=torch.float64)
    ours = UnlimiformerAttention(base, S).train()
    found = []
    for attention in (base, ours):
        torch.manual_seed(3)
        found.append(attention(hidden, key_value_states=states)[0])
    assert (found[0] - found[1]).abs().max() < 1e-10
    # Nothing is left out of an answer.
    base.eval(), ours.eval()
    assert (base(hidden, key_value_states=states)[0] - ours(hidden, key_value_states=states)[0]).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["bart", "led"])
def test_decoding_token_by_token_is_the_whole_at_once(kind: str) -> None:
    model = make(kind)
    states, tokens, _ = states_and_tokens()
    assert (
        step_by_step(extend(copy.deepcopy(model), S), states, tokens) - logits(model, states, tokens)
    ).abs().max() < 1e-10
    few = extend(model, 7)
    assert (step_by_step(few, states, tokens) - logits(few, states, tokens)).abs().max() < 1e-10


def slow(base: Any, x_TD: torch.Tensor, states_SD: torch.Tensor, k: int) -> torch.Tensor:
    """One row, in loops: each head of each token takes the k states with the largest q . k."""
    out = []
    for x in x_TD:
        heads = []
        q, keys, values = base.q_proj(x), base.k_proj(states_SD), base.v_proj(states_SD)
        for head in range(base.num_heads):
            part = slice(head * base.head_dim, (head + 1) * base.head_dim)
            scores = keys[:, part] @ q[part] * base.head_dim**-0.5
            best = scores.argsort(descending=True)[:k]
            heads.append(scores[best].softmax(0) @ values[best][:, part])
        out.append(base.out_proj(torch.cat(heads)))
    return torch.stack(out)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("k", [1, 6, 49])
def test_each_head_has_its_own_k_best_states(k: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infini.pretrained.unlimiformer.SCORES_PER_CALL", 2 * 4 * 13)
    base = make("bart").model.decoder.layers[0].encoder_attn
    states = states_and_tokens()[0]
    x = torch.randn(2, tokens, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ours = UnlimiformerAttention(base, k)(x, states)[0]
    for row in range(2):
        assert (ours[row] - slow(base, x[row], states[row], k)).abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 6, 49])
def test_the_kth_largest_is_that_of_a_sort(k: int, dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, 49, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    masked = scores.masked_fill(torch.arange(49) > 40, -torch.inf)
    found = _kth_largest(masked, k)
    assert found.dtype == dtype and not found.requires_grad
    assert torch.equal(found, masked.sort(-1, descending=True).values[..., k - 1 : k])


def test_under_autocast_states_are_searched_as_exactly_as_they_are() -> None:
    """Two states that are one in bfloat16."""
    base = make("bart").model.decoder.layers[0].encoder_attn.float()
    states = torch.zeros(1, 9, 16)
    asking = torch.zeros(1, 2, 1, 16)
    asking[..., 0] = 1.0
    states[0, :, 0] = 1.0
    states[0, 7, 0] = 1.0 + 1e-4
    with torch.autocast("cpu", torch.bfloat16):
        best = UnlimiformerAttention(base, 1)._best(asking, states, None)
    assert (best == 7).all()


def test_what_is_masked_is_never_found() -> None:
    model = extend(make("bart"), 5)
    states, tokens, mask = states_and_tokens()
    before = logits(model, states, tokens[:, :1], mask)
    states[1, 30:] *= 100
    assert (logits(model, states, tokens[:, :1], mask) - before).abs().max() < 1e-12
    assert (logits(model, states, tokens, mask) - logits(model, states, tokens)).abs().max() > 1e-6


def test_gradients_reach_the_states_that_were_found_and_no_others() -> None:
    base = make("bart").model.decoder.layers[0].encoder_attn
    states = states_and_tokens(rows=1)[0].requires_grad_()
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    UnlimiformerAttention(base, 2)(x, states)[0].sum().backward()
    assert states.grad is not None
    reached = int((states.grad[0].abs().sum(-1) > 0).sum())
    assert 2 <= reached <= 2 * 3 * base.num_heads < S


def test_the_approximate_search_finds_almost_all_and_its_index_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    from infini.pretrained import unlimiformer

    made: list[int] = []
    original = unlimiformer._hnsw

    def counted(rows: torch.Tensor) -> Any:
        made.append(len(rows))
        return original(rows)

    monkeypatch.setattr(unlimiformer, "_hnsw", counted)
    model = make("bart")
    states, tokens, _ = states_and_tokens()
    exact = step_by_step(extend(copy.deepcopy(model), 8), states, tokens)
    ours = step_by_step(extend(model, 8, "approximate"), states, tokens)
    assert len(made) == 2, "one a row, for all layers, heads and tokens"
    assert (ours - exact).abs().max() < 1e-5, "among fifty states it misses none"


def test_the_approximate_search_finds_almost_all_of_many_that_lie_far_off() -> None:
    """More states than it looks at by default, and a mean that is large beside what tells them apart."""
    pytest.importorskip("faiss")
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(1, 4000, 16, generator=generator) + 30 * torch.randn(16, generator=generator)
    queries = torch.randn(1, 20, 16, generator=generator)
    found = StateIndex().nearest(states, queries, 300)
    best = (queries @ states.mT).topk(300).indices
    recall = [len(set(a.tolist()) & set(b.tolist())) / 300 for a, b in zip(found[0], best[0], strict=True)]
    assert min(recall) > 0.9 and sum(recall) / len(recall) > 0.97


def test_the_approximate_search_finds_no_padding() -> None:
    pytest.importorskip("faiss")
    model = make("bart")
    states, tokens, mask = states_and_tokens()
    # Large, so that it would be found first.
    states[1, 30:] *= 100
    exact, ours = extend(copy.deepcopy(model), 8), extend(model, 8, "approximate")
    for length in (1, 9):
        difference = logits(ours, states, tokens[:, :length], mask) - logits(exact, states, tokens[:, :length], mask)
        assert difference.abs().max() < 1e-5
    mask[1, 5:] = 0
    few = logits(ours, states, tokens[:, :1], mask)
    assert (few - logits(exact, states, tokens[:, :1], mask)).abs().max() < 1e-5, "fewer than are asked for"


@pytest.mark.parametrize("kind", ["bart", "led"])
def test_a_long_input_is_encoded_in_windows(kind: str) -> None:
    model = make(kind)
    encoder = model.get_encoder()
    ids = torch.randint(3, 60, (1, 70), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        states = encode(encoder, ids, 32, attention_mask=torch.ones_like(ids))
        assert states.shape == (1, 70, 16)
        for window in windows(70, 32):
            alone = encoder(input_ids=ids[:, window.start : window.stop]).last_hidden_state
            kept = slice(window.keep_start - window.start, window.keep_stop - window.start)
            assert (states[:, window.keep_start : window.keep_stop] - alone[:, kept]).abs().max() < 1e-10
        whole = encode(encoder, ids[:, :20], 32)
        assert (whole - encoder(input_ids=ids[:, :20]).last_hidden_state).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["bart", "led"])
def test_a_row_is_encoded_as_it_is_alone(kind: str) -> None:
    """Whatever else is in the batch: windows laid over the longest row would cut the others elsewhere."""
    encoder = make(kind).get_encoder()
    lengths = [70, 13, 32, 40, 0, 70]
    ids = torch.randint(3, 60, (len(lengths), 70), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(70) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        together = encode(encoder, ids, 32, attention_mask=mask.long())
        assert together.shape == (len(lengths), 70, 16)
        for row, length in zip(range(len(lengths)), lengths, strict=True):
            if length:
                alone = encode(encoder, ids[row : row + 1, :length], 32, attention_mask=torch.ones(1, length).long())
                assert (together[row, :length] - alone[0]).abs().max() < 1e-10


def test_generation_runs_on_an_input_of_any_length() -> None:
    model = extend(make("bart"), 4)
    states = torch.randn(1, 500, 16, dtype=torch.float64)
    out = model.generate(
        encoder_outputs=BaseModelOutput(last_hidden_state=states), max_new_tokens=6, do_sample=False, num_beams=1
    )
    assert 1 < out.shape[1] <= 7


def test_what_it_cannot_extend_is_refused() -> None:
    with pytest.raises(ValueError, match="search='none'"):
        extend(make("bart"), 4, "none")
    with pytest.raises(ValueError, match="k=0"):
        extend(make("bart"), 0)
    with pytest.raises(ValueError, match="Linear: no encoder-decoder"):
        extend(torch.nn.Linear(2, 2), 4)
