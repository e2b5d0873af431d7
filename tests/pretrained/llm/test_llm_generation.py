"""Stock generate() on injected models: how text is drawn, what goes in, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers import assert_close
from tiny_llms import ADDITIONS, SHARED, N, greedy, greedy_by_hand, logits, padded, prompt, tiny_base, tiny_llm

from infini.pretrained.llm import InfiniCache

KINDS = pytest.mark.parametrize("name", ["llama", "gemma3"])
OPTIONS = pytest.mark.parametrize("options", [{}, ADDITIONS], ids=["paper", "all"])


@pytest.mark.parametrize(
    ("tokens", "options", "name"),
    [
        pytest.param(
            k * N + d,
            ADDITIONS if kind == "all" else {},
            name,
            id=f"{k}N{d:+}-{kind}-{name}",
            # The default is one boundary of the plain family, and the other with all additions or sliding layers.
            marks=[] if (k, kind, name) in ((1, "paper", "llama"), (3, "all", "llama"), (3, "paper", "gemma3"))
            else [pytest.mark.slow],
        )
        for k in (1, 3)
        for d in (-1, 0, 1)
        for kind in ("paper", "all")
        for name in ("llama", "gemma3")
    ],
)  # fmt: skip
def test_prompts_around_boundaries(tokens: int, options: dict[str, Any], name: str) -> None:
    model, ids = tiny_llm(name, **options), prompt(1, tokens)
    expected = greedy_by_hand(model, ids, N + 2)
    assert torch.equal(greedy(model, ids, N + 2), expected)
    assert torch.equal(greedy(model, ids, N + 2, prefill_chunk_size=5), expected)


_DRAWING: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "beam_sampling": {"do_sample": True, "num_beams": 3},
}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        pytest.param(
            options,
            name,
            id=f"{kind}-{name}",
            marks=[pytest.mark.slow] if name == "gemma3" and kind != "beam_sampling" else [],
        )
        for kind, options in _DRAWING.items()
        for name in ("llama", "gemma3")
    ],
)
def test_drawn_as_without_a_cache(options: dict[str, Any], name: str) -> None:
    model, ids = tiny_llm(name), prompt(2, 2 * N + 5)
    drawn = []
    for use_cache in (True, False):
        transformers.set_seed(7)
        drawn.append(model.generate(ids, max_new_tokens=N + 3, use_cache=use_cache, **options))
    assert torch.equal(*drawn)


@KINDS
def test_padded_prompts_in_chunks_and_with_beams(name: str) -> None:
    """A chunk may be all padding for some row."""
    model = tiny_llm(name)
    prompts, ids, mask = padded([3, N, 2 * N + 1])
    for options in ({"prefill_chunk_size": 5}, {"num_beams": 2}):
        drawn = greedy(model, ids, N + 1, attention_mask=mask, **options)
        alone = [greedy(model, one[None], N + 1, **options)[0, -N - 1 :] for one in prompts]
        assert torch.equal(drawn[:, -N - 1 :], torch.stack(alone))


@OPTIONS
def test_padding_between_tokens(options: dict[str, Any]) -> None:
    """Turns of unequal length leave such padding. Real tokens are counted, wherever they stand. (Stock layers that
    slide count columns.)"""
    model, ids = tiny_llm(**options), prompt(2, 3 * N)
    mask = torch.ones_like(ids)
    mask[0, N - 2 : N + 3] = mask[1, :1] = mask[1, 4:6] = mask[1, 2 * N : 2 * N + 3] = 0
    together = greedy(model, ids, N, attention_mask=mask)[:, -N:]
    for row, one, real in zip(together, ids, mask.bool(), strict=True):
        assert torch.equal(row, greedy(model, one[real][None], N)[0, -N:])


def repeating(tokens: int) -> torch.Tensor:
    """A prompt whose continuation is often found in it."""
    return prompt(1, tokens // 2).repeat(1, 2)


@SHARED
def test_prompt_lookup(options: dict[str, Any], name: str) -> None:
    """Drafted tokens that are rejected leave no trace in window and memory."""
    model, ids = tiny_llm(name, **options), repeating(4 * N + 2)
    expected = greedy(model, ids, 2 * N + 3)
    for drafted in (3, N + 2):
        assert torch.equal(greedy(model, ids, 2 * N + 3, prompt_lookup_num_tokens=drafted), expected)


@KINDS
def test_assisted_by_an_injected_and_by_a_stock_model(name: str) -> None:
    model, ids = tiny_llm(name), prompt(1, 2 * N + 3)
    expected = greedy(model, ids, 2 * N + 3)
    for assistant in (tiny_llm(name, gate_init=-1.5), tiny_base(name)):
        assert torch.equal(greedy(model, ids, 2 * N + 3, assistant_model=assistant), expected)
    base = tiny_base(name)
    helped = greedy(base, ids, 2 * N + 3, assistant_model=tiny_llm(name))
    assert torch.equal(helped, greedy(base, ids, 2 * N + 3))


def test_assisted_decoding_does_not_read_a_text_twice() -> None:
    """transformers' first assisted step is given all tokens of a text, whatever a cache has read."""
    model, ids = tiny_llm(), prompt(1, 3 * N)
    cache = model(ids[:, : 2 * N], use_cache=True).past_key_values
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    padded_cache = model(ids[:, : 2 * N], attention_mask=mask[:, : 2 * N], use_cache=True).past_key_values
    for helper in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": tiny_llm(gate_init=-1.5)}):
        with pytest.raises(ValueError, match="would read the 16 tokens of the cache again: pass only the new ones"):
            greedy(model, ids, 5, past_key_values=cache.fork(), **helper)
        # The message suggests this.
        new = model.generate(**cache.inputs(ids[:, 2 * N :]), max_new_tokens=5, do_sample=False, **helper)
        assert torch.equal(new[:, N:], greedy(model, ids, 5)[:, 3 * N :])
        with pytest.raises(ValueError, match="cannot continue a cache with padding: decode without an assistant"):
            greedy(model, ids, 5, attention_mask=mask, past_key_values=padded_cache.fork(), **helper)


@KINDS
def test_a_conversation_goes_on(name: str) -> None:
    """The next turn passes all tokens, as transformers' users do, or the new ones alone."""
    model, first = tiny_llm(name), prompt(1, N + 5)
    out = greedy(model, first, 7, return_dict_in_generate=True)
    cache, new = out.past_key_values, prompt(1, 2 * N + 3, seed=5)
    turn = torch.cat([out.sequences, new], 1)
    expected = greedy(model, turn, N)
    whole = {"attention_mask": torch.ones_like(turn), "past_key_values": cache.fork()}
    assert torch.equal(greedy(model, turn, N, **whole), expected)
    # The last drawn token was not read yet.
    asked = cache.inputs(turn[:, cache.columns :])
    assert torch.equal(greedy(model, asked.pop("input_ids"), N, **asked)[:, -N:], expected[:, -N:])


@pytest.mark.parametrize(
    "drawing",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2},
    ],
    ids=["beams", "several beams", "return_sequences", "beam_sampling"],
)
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_several_continuations_of_what_was_read(name: str, drawing: dict[str, Any]) -> None:
    """Beams and sequences behind a cache are those behind the whole text, padded or not; the cache stays as it was."""
    model, questions = tiny_llm(name), prompt(2, N + 1, seed=5)
    for lengths in ([2 * N + 3] * 2, [3, 2 * N + 1]):
        texts, ids, mask = padded(lengths)
        with torch.no_grad():
            cache = model(ids, attention_mask=mask, position_ids=_positions(mask), use_cache=True).past_key_values
        _, whole, whole_mask = _joined(texts, questions)
        given = {"all": {"input_ids": whole, "attention_mask": whole_mask}, "new": cache.inputs(questions)}
        given["cache"] = {**given["all"], "past_key_values": cache.fork()}
        drawn = {}
        for kind, inputs in given.items():
            transformers.set_seed(7)
            drawn[kind] = model.generate(**inputs, max_new_tokens=N + 3, **drawing)[:, -N - 3 :]
        assert len(drawn["all"]) == 2 * drawing.get("num_return_sequences", 1)
        assert torch.equal(drawn["new"], drawn["all"]) and torch.equal(drawn["cache"], drawn["all"])
        assert cache.batch_size == 2


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _joined(
    texts: list[torch.Tensor], questions: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Each text with its question, apart and together."""
    both = [torch.cat(pair) for pair in zip(texts, questions, strict=True)]
    _, ids, mask = padded([len(row) for row in both])
    ids[mask.bool()] = torch.cat(both)
    return both, ids, mask


@KINDS
def test_from_embeddings(name: str) -> None:
    model, ids = tiny_llm(name), prompt(1, 2 * N + 3)
    embeds = model.get_input_embeddings()(ids)
    drawn = model.generate(inputs_embeds=embeds, max_new_tokens=N, do_sample=False)
    assert torch.equal(drawn, greedy(model, ids, N)[:, ids.shape[1] :])


def test_logits_to_keep_and_hidden_states() -> None:
    model, ids = tiny_llm(), prompt(1, 2 * N + 3)
    out, last = model(ids, output_hidden_states=True), logits(model, ids, logits_to_keep=1)
    # The same product, bit by bit; products of one row and of many may round differently.
    assert torch.equal(last, model.lm_head(out.hidden_states[-1][:, -1:]))
    torch.testing.assert_close(last, logits(model, ids)[:, -1:], rtol=1e-12, atol=1e-12)
    assert len(out.hidden_states) == 3 and isinstance(out.past_key_values, InfiniCache)


def test_other_caches_are_one_clear_error() -> None:
    model, ids = tiny_llm(), prompt(1, 5)
    for kind in ("static", "offloaded", "quantized", "offloaded_static"):
        with pytest.raises(ValueError, match=f"cache_implementation='{kind}': an injected model has its own bounded"):
            greedy(model, ids, 2, cache_implementation=kind)
    stock = transformers.DynamicCache(config=model.config)
    for call in (lambda: greedy(model, ids, 2, past_key_values=stock), lambda: model(ids, past_key_values=stock)):
        with pytest.raises(
            ValueError, match="past_key_values is a DynamicCache: an injected model takes an InfiniCache"
        ):
            call()
    with pytest.raises(ValueError, match="the cache was made for"):
        model(ids, past_key_values=InfiniCache(tiny_llm(sinks=1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True}, "output_attentions: "),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "must be a 2D padding mask"),
        ({"attention_mask": torch.ones(1, 7)}, "attention_mask has 7 columns: the cache has 0 and the call 5"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 2]]), "use_cache": False}, "packed sequences"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}, "packed sequences"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 2]]), "attention_mask": torch.ones(1, 5)}, "packed sequences"),
    ],
    ids=["attentions", "4d", "width", "packed", "packed with a cache", "packed with a mask"],
)
def test_inputs_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_llm()(prompt(1, 5), **options)


def test_what_was_read_cannot_be_hidden_later() -> None:
    """The second turn of a batch of conversations: a row that had ended was fed padding as text."""
    model, pad = tiny_llm(), 0
    first = greedy(model, prompt(2, 5), N + 2, return_dict_in_generate=True, pad_token_id=pad)
    seen = torch.cat([first.sequences, prompt(2, 4, seed=5)], 1)
    mask = torch.ones_like(seen)
    again = {"past_key_values": first.past_key_values, "max_new_tokens": 2, "do_sample": False}
    mask[1, 9:12] = 0
    with pytest.raises(ValueError, match="tokens that were read cannot be hidden later"):
        model.generate(seen, attention_mask=mask, **again)
    model.generate(seen, attention_mask=torch.ones_like(seen), **again)


@pytest.mark.parametrize("drawing", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@KINDS
def test_what_was_read_cannot_be_hidden_from_one_new_token(name: str, drawing: dict[str, Any]) -> None:
    """This holds for one new token as for several: a mask that differs from that of the read tokens is refused, and the
    cache stays as it was."""
    model, text = tiny_llm(name), prompt(2, N + 4)
    cache = model(text, use_cache=True).past_key_values
    for new in (1, 2):
        turn = torch.cat([text, prompt(2, new, seed=7)], 1)
        mask = torch.ones_like(turn)
        mask[1, 6 : N + 4] = 0
        with pytest.raises(ValueError, match=r"shows \[12, 6\] .* has read \[12, 12\]: tokens that were read"):
            greedy(model, turn, 2, attention_mask=mask, past_key_values=cache, **drawing)
        assert cache.batch_size == 2 and cache.columns == N + 4
        seen = {"attention_mask": torch.ones_like(turn), "past_key_values": cache.fork()}
        assert torch.equal(greedy(model, turn, 2, **seen, **drawing), greedy(model, turn, 2, **drawing))


@KINDS
def test_a_cache_that_shall_not_be_used_is_refused(name: str) -> None:
    """generate() would read the whole text at every step, behind what the cache has read."""
    model, ids = tiny_llm(name), prompt(1, N + 4)
    for cache in (InfiniCache(model), model(ids[:, :N], use_cache=True).past_key_values):
        with pytest.raises(ValueError, match="^use_cache=False: generate.* past_key_values; leave one of the two out$"):
            greedy(model, ids, 2, past_key_values=cache, use_cache=False)
    assert torch.equal(greedy(model, ids, 2, use_cache=False), greedy(model, ids, 2))


def test_decoding_with_the_first_layers_alone_is_refused() -> None:
    """The refusal leaves the model as it was."""
    model, ids = tiny_llm(), prompt(1, 5)
    with pytest.raises(ValueError, match="assistant_early_exit: the first layers of an injected model"):
        greedy(model, ids, 4, assistant_early_exit=1)
    assert torch.equal(greedy(model, ids, 4), greedy_by_hand(model, ids, 4))


@pytest.mark.parametrize("hidden", [1, 0], ids=["padded", "ones"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("gemma3", {}, id="gemma3"),
        pytest.param("llama", {"layers": [0]}, id="llama-layers"),
    ],
)
def test_a_mask_has_the_rows_of_the_batch_or_one_for_all(name: str, options: dict[str, Any], hidden: int) -> None:
    model, ids, mask = tiny_llm(name, **options), prompt(2, N + 3), torch.ones(3, N + 3)
    mask[:, :hidden] = 0
    with pytest.raises(ValueError, match="attention_mask has 3 rows, the batch 2"):
        model(ids, attention_mask=mask)
    expected = logits(model, ids, attention_mask=mask[:2])
    assert torch.equal(logits(model, ids, attention_mask=mask[:1]), expected)
    cache, parts = InfiniCache(model), []
    for start, stop in ((0, N), (N, N + 2), (N + 2, N + 3)):
        with torch.no_grad():
            part = model(ids[:, start:stop], attention_mask=mask[:1, :stop], past_key_values=cache, use_cache=True)
        parts.append(part.logits)
    assert_close(torch.cat(parts, 1)[:, hidden:], expected[:, hidden:], 1e-6, "in calls")


def test_assisted_decoding_without_a_cache_is_refused_as_by_the_base() -> None:
    for model in (tiny_llm(), tiny_base()):
        with pytest.raises(ValueError, match="assisted generate requires `use_cache=True`"):
            greedy(model, prompt(1, 5), 2, prompt_lookup_num_tokens=2, use_cache=False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
def test_a_mask_may_have_any_dtype(dtype: torch.dtype) -> None:
    model, (_, ids, mask) = tiny_llm(), padded([N + 3, N])
    assert torch.equal(logits(model, ids, attention_mask=mask.to(dtype)), logits(model, ids, attention_mask=mask))


def test_another_kernel_under_the_attention_is_refused() -> None:
    """It would compute with unrotated keys, without a word."""
    model = tiny_llm()
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="config._attn_implementation='sdpa': an injected model has 'infini'"):
        model(prompt(1, 5))


def test_a_question_that_would_be_cut_is_refused() -> None:
    """The new tokens alone, without saying so, are taken for the whole text by generate()."""
    model = tiny_llm()
    cache = model(prompt(1, 20)).past_key_values
    with pytest.raises(ValueError, match="the cache has read 20 tokens, the input has 4"):
        greedy(model, prompt(1, 4), 2, past_key_values=cache)
    more = prompt(2, 4)
    with pytest.raises(ValueError, match=r"the batch has 2 rows, the cache 1: pass past_key_values=cache.fork\(2\)"):
        model(more, past_key_values=cache)
    twice = model(more, past_key_values=cache.fork(2))
    alone = model(more[1:], past_key_values=cache.fork())
    assert_close(twice.logits[1:], alone.logits, 1e-10, "logits of the second row")
    with pytest.raises(ValueError, match="the batch has 3 rows, the cache 2: pass as many, or a fresh InfiniCache"):
        model(prompt(3, 4), past_key_values=twice.past_key_values)
