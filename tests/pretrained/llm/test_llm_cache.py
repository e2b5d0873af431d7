"""The cache by itself: its size, its files, its forks, and what crop takes back."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import assert_close, assert_same_state
from tiny_llms import ADDITIONS, SHARED, N, greedy, logits, logits_in_calls, padded, prompt, tiny_base, tiny_llm

from infini.errors import InputError
from infini.nn.tensor_file import read_tensors, write_tensors
from infini.pretrained.llm import InfiniCache, inject
from infini.pretrained.llm import cache as cache_module

_STOCK: list[Any] = [
    pytest.param("gemma3", {}, id="gemma3"),
    pytest.param("gemma2", {}, id="gemma2"),
    pytest.param("qwen2_sliding", {}, id="qwen2_sliding"),
    pytest.param("llama", {"layers": [1]}, id="llama-layers"),
]
"""These families have layers that slide, or a global layer without a memory."""


@SHARED
def test_its_bytes_do_not_grow(options: dict[str, Any], name: str) -> None:
    """The bytes of tensors and of what they keep alive are the same after hundreds of segments as after two."""
    model, cache = tiny_llm(name, **options), None
    sizes = set()
    for seed in range(12):
        with torch.no_grad():
            cache = model(
                prompt(1, [N, 40 * N, 1][seed % 3], seed), past_key_values=cache, use_cache=True
            ).past_key_values
        if seed > 1:
            stored = [x for layer in cache.memory_layers.values() for _, x in cache_leaves(layer.state)]
            kept = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in stored}.values())
            sizes.add((cache.nbytes(), kept <= cache.nbytes()))
    assert len(sizes) == 1 and sizes.pop()[1]
    assert cache.get_seq_length() == sum([N, 40 * N, 1]) * 4
    assert repr(cache) == f"InfiniCache(1,316 columns read, {cache.nbytes():,} bytes, segments of {N} tokens)"


def cache_leaves(state: Any) -> Any:
    from infini.nn.state import leaves

    return leaves(state)


@SHARED
def test_saved_and_loaded(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    """A book read once, in another process asked; the file holds no code, and damage is seen."""
    model, ids, more = tiny_llm(name, **options), prompt(2, 3 * N + 3), prompt(2, N + 4, seed=3)
    cache = logits_in_calls(model, ids, [ids.shape[1]])[1]
    cache.save(path := tmp_path / "book.safetensors")
    loaded = InfiniCache.load(path, model)
    assert loaded.nbytes() == cache.nbytes() and loaded.lengths == cache.lengths
    for calls in ([N + 4], [1] * (N + 4)):
        expected = logits_in_calls(model, more, calls, cache.fork())[0]
        assert torch.equal(logits_in_calls(model, more, calls, loaded.fork())[0], expected)
    assert_close(expected, logits(model, torch.cat([ids, more], 1))[:, ids.shape[1] :], 1e-10, "after the book")
    path.write_bytes(path.read_bytes()[:-8] + b"12345678")
    with pytest.raises(ValueError, match=r"book.safetensors: checksum mismatch"):
        InfiniCache.load(path, model)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    cache = logits_in_calls(tiny_llm(), prompt(1, 5), [5])[1]
    cache.save(path := tmp_path / "c.safetensors")
    for other, message in (
        (tiny_llm("qwen2"), "model_type='infini_llama', the model has model_type='infini_qwen2'"),
        (tiny_llm(sinks=1), "sinks=0, the model has sinks=1"),
        (tiny_llm(rule="linear"), "update_rule='delta', the model has update_rule='linear'"),
    ):
        with pytest.raises(ValueError, match=message):
            InfiniCache.load(path, other)
    for change, found in (({"num_key_value_heads": 4}, "4 key-value heads of 8"), ({"head_dim": 4}, "2 .* of 4")):
        # Two bases without a name, as they come from a config.
        config = transformers.LlamaConfig(**{**tiny_base().config.to_dict(), **change})
        other = inject(transformers.LlamaForCausalLM(config), N)
        with pytest.raises(InputError, match=f"was saved with 2 key-value heads of 8, the model has {found}"):
            InfiniCache.load(path, other)
    tensors, about = read_tensors(path)
    write_tensors(path, tensors, {**about, "format": "another"})
    with pytest.raises(ValueError, match="is not 'infini-cache-1'"):
        InfiniCache.load(path, tiny_llm())
    with pytest.raises(ValueError, match="cannot be read"):
        InfiniCache.load(tmp_path / "none", tiny_llm())
    with pytest.raises(ValueError, match="the cache is empty"):
        InfiniCache(tiny_llm()).save(path)


@SHARED
def test_forks_share_nothing(options: dict[str, Any], name: str) -> None:
    """Many questions about one book, one after the other and at once; the book's own cache stays as it was."""
    model, book = tiny_llm(name, **options), prompt(1, 2 * N + 3)
    cache = logits_in_calls(model, book, [book.shape[1]])[1]
    questions = prompt(3, N + 1, seed=4)
    expected = [greedy(model, torch.cat([book, q[None]], 1), N)[0, -N:] for q in questions]
    for question, answer in zip(questions, expected, strict=True):
        asked = cache.inputs(question[None])
        assert torch.equal(greedy(model, asked.pop("input_ids"), N, **asked)[0, -N:], answer)
    asked = cache.inputs(questions)
    assert torch.equal(greedy(model, asked.pop("input_ids"), N, **asked)[:, -N:], torch.stack(expected))
    assert cache.lengths == [book.shape[1]] and cache.columns == book.shape[1]


def test_inputs_are_rows_of_tokens() -> None:
    cache = logits_in_calls(tiny_llm(), prompt(1, 5), [5])[1]
    with pytest.raises(InputError, match="input_ids has 1 axes: must be"):
        cache.inputs(prompt(1, 3)[0])


def test_inputs_behind_padding(tmp_path: Path) -> None:
    """Prompts of two lengths, then a question to each."""
    model = tiny_llm("gemma3")
    prompts, ids, mask = padded([N + 1, 3])
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    questions = prompt(2, 5, seed=4)
    asked = cache.inputs(questions)
    assert asked["attention_mask"].tolist()[1] == [0] * (N - 2) + [1] * 8
    drawn = greedy(model, asked.pop("input_ids"), N, **asked)[:, -N:]
    for row, one, question in zip(drawn, prompts, questions, strict=True):
        assert torch.equal(row, greedy(model, torch.cat([one, question])[None], N)[0, -N:])
    assert cache.fork(2).lengths == [N + 1, N + 1, 3, 3]
    cache.save(tmp_path / "cache.safetensors")
    loaded = InfiniCache.load(tmp_path / "cache.safetensors", model)
    assert torch.equal(loaded.inputs(questions)["attention_mask"], asked["attention_mask"])
    with pytest.raises(ValueError, match="input_ids has 3 rows, the cache 2"):
        cache.inputs(prompt(3, 4))


def test_padding_between_texts_is_none_before_them() -> None:
    model, mask = tiny_llm(), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:7] = 0
    cache = InfiniCache(model)
    with torch.no_grad():
        model(prompt(2, 5), past_key_values=cache)
        model(prompt(2, 4, seed=2), attention_mask=mask, past_key_values=cache)
    assert cache.lengths == [9, 7]
    with pytest.raises(ValueError, match="padding after a row's first token"):
        cache.inputs(prompt(2, 3))


@pytest.mark.parametrize(("name", "options"), [pytest.param("llama", {}, id="llama"), *_STOCK])
def test_padding_before_a_text_is_not_counted(name: str, options: dict[str, Any]) -> None:
    """Texts of two lengths are read without position_ids; questions follow by generate() and by hand, also token by
    token. Layers without a memory rotate as they do in rows alone."""
    model, questions = tiny_llm(name, **options), prompt(2, 3, seed=4)
    texts, ids, mask = padded([3, 2 * N + 1])
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    alone = [torch.cat(pair)[None] for pair in zip(texts, questions, strict=True)]
    expected = torch.cat([logits(model, row)[:, -3:] for row in alone])
    asked = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    drawn = model.generate(**cache.inputs(questions), **asked).logits[0]
    assert_close(drawn, expected[:, -1], 1e-6, "by generate()")
    for calls in ([3], [1, 1, 1]):
        again, seen, found = cache.fork(), mask, []
        for part in questions.split(calls, 1):
            seen = torch.cat([seen, torch.ones_like(part)], 1)
            with torch.no_grad():
                found.append(model(part, attention_mask=seen, past_key_values=again).logits)
        assert_close(torch.cat(found, 1), expected, 1e-6, f"calls of {calls}")


@pytest.mark.parametrize(("name", "options"), [pytest.param("llama", {}, id="llama"), *_STOCK])
def test_questions_of_different_lengths(name: str, options: dict[str, Any]) -> None:
    """Padded behind a text they get the logits of rows alone, or, where layers slide, one clear error."""
    model = tiny_llm(name, **options)
    cache = logits_in_calls(model, book := prompt(2, 2 * N + 4), [2 * N + 4])[1]
    questions, ids, mask = padded([3, N + 1], seed=4)
    asked = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    expected = [logits(model, torch.cat([*pair])[None])[:, -1] for pair in zip(book, questions, strict=True)]
    if any(layer.is_sliding for layer in cache.layers):
        with pytest.raises(ValueError, match="row 0 has 6 columns of padding after its first token.*separate calls"):
            model.generate(**cache.inputs(ids, mask), **asked)
        # The message suggests this.
        for row, question in enumerate(questions):
            alone = cache.fork()
            alone.batch_select_indices(torch.tensor([row]))
            found = model.generate(**alone.inputs(question[None]), **asked).logits[0]
            assert_close(found, expected[row], 1e-6, f"row {row}")
    else:
        found = model.generate(**cache.inputs(ids, mask), **asked).logits[0]
        assert_close(found, torch.cat(expected), 1e-6, "padded")


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen2_sliding"])
def test_padding_in_a_sliding_window_is_refused(name: str) -> None:
    """It is refused without `inputs`, too: between tokens, and, once a token is drawn, behind a prompt. If the window
    holds all columns, padding takes no token's place."""
    _, ids, mask = padded([2 * N, N], side="right")
    after = torch.cat([ids, prompt(2, 1, seed=5)], 1), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    for tokens, real in ((ids, mask), after):
        with pytest.raises(ValueError, match="row 1 has 8 columns of padding after its first token"):
            greedy(tiny_llm(name), tokens, 2, attention_mask=real)
    layers = tiny_llm(name).config.infini["layers"]
    model = inject(tiny_base(name, sliding_window=4 * N), N, gate_init=-0.5, layers=layers)
    found = greedy(model, after[0], 5, attention_mask=after[1])[:, -5:]
    for row, one, real in zip(found, after[0], after[1].bool(), strict=True):
        assert torch.equal(row, greedy(model, one[real][None], 5)[0, -5:])
    for window, holds_all in ((2 * N + 1, True), (2 * N, False)):
        model = inject(tiny_base(name, sliding_window=window), N, gate_init=-0.5, layers=layers)
        refused = pytest.raises(ValueError, match="row 1 has 8 columns of padding after its first token")
        with torch.no_grad(), contextlib.nullcontext() if holds_all else refused:
            model(after[0], attention_mask=after[1])


@pytest.mark.parametrize(("name", "options"), [("llama", {"layers": [1]}), ("gemma3", {})])
def test_padding_has_one_effect_with_and_without_a_cache(name: str, options: dict[str, Any]) -> None:
    """Training keeps no cache, but layers without a memory count tokens there, too, not columns, and it refuses what
    generation refuses."""
    model = inject(tiny_base(name, sliding_window=4 * N if name == "gemma3" else None), N, gate_init=-0.5, **options)
    ids, mask = prompt(1, 2 * N + 4), torch.ones(1, 2 * N + 4, dtype=torch.long)
    mask[0, 5:9] = 0
    alone = logits(model.eval(), ids[mask.bool()][None])[0, -1]
    with torch.no_grad():
        assert_close(model(ids, attention_mask=mask, use_cache=True).logits[0, -1], alone, 1e-6, "with a cache")
        assert_close(model.train()(ids, attention_mask=mask).logits[0, -1], alone, 1e-6, "in training")
    if name == "gemma3":
        with pytest.raises(ValueError, match="row 0 has 4 columns of padding after its first token"):
            tiny_llm(name).train()(ids, attention_mask=mask)


_READ = {"1": 1, "2N": 2 * N, "3N+1": 3 * N + 1}


@pytest.mark.parametrize(
    ("read", "options", "name"),
    [
        pytest.param(
            _READ[read],
            ADDITIONS if kind == "all" else {},
            name,
            id=f"{read}-{kind}-{name}",
            # The default is all places with the plain family and all additions, and all families behind whole segments.
            marks=[] if (kind, name) == ("all", "llama") or read == "2N" else [pytest.mark.slow],
        )
        for read in _READ
        for kind in ("paper", "all")
        for name in ("llama", "gemma3")
    ],
)
def test_crop_leaves_no_trace(read: int, options: dict[str, Any], name: str) -> None:
    """Whatever was taken back, inside a segment or over boundaries, the state is that of the tokens that stayed."""
    model, ids = tiny_llm(name, **options), prompt(1, 6 * N)
    for removed in (1, N - 1, N, 2 * N + 1):
        cache = logits_in_calls(model, ids[:, :read], [read])[1]
        cache.activate_past_recording()
        logits_in_calls(model, ids[:, read : read + 2 * N + 2], [1, 2 * N - 1, 2], cache)
        cache.crop(-removed)
        stayed = read + 2 * N + 2 - removed
        plain = logits_in_calls(model, ids[:, :stayed], [stayed])[1]
        assert cache.lengths == plain.lengths and cache.columns == plain.columns
        for i, layer in cache.memory_layers.items():
            assert_same_state(layer.state.memory, plain.layers[i].state.memory, 1e-10)
            assert_same_state(layer.state.pending, plain.layers[i].state.pending, 1e-10)
        after = prompt(1, N + 3, seed=8)
        expected = logits_in_calls(model, after, [1] * (N + 3), plain)[0]
        assert_close(logits_in_calls(model, after, [1] * (N + 3), cache)[0], expected, 1e-10, f"{removed} removed")


def test_crop_takes_back_padding_before_a_text() -> None:
    model, mask = tiny_llm(), torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1]])
    cache = InfiniCache(model)
    cache.activate_past_recording()
    with torch.no_grad():
        model(prompt(2, 4), attention_mask=mask, past_key_values=cache)
    cache.crop(-2)
    assert cache.lengths == [2, 0]
    assert cache.inputs(prompt(2, 1))["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_what_crop_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last columns of a long prompt stay recorded, and these can be taken back."""
    monkeypatch.setattr(cache_module, "ROLLBACK", 2 * N)
    model, ids = tiny_llm(), prompt(1, 20 * N + 3)
    cache = InfiniCache(model)
    cache.activate_past_recording()
    logits_in_calls(model, ids, [12 * N, 1, 8 * N + 2], cache)
    assert cache._past.recorded == 2 * N
    # The state at the last crop is as large as the state itself; beside it are keys and values of 2 N columns.
    whole, config = logits_in_calls(model, ids, [20 * N + 3])[1], model.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    columns = 2 * N * 2 * heads * config.head_dim * model.dtype.itemsize
    assert cache.nbytes() == 2 * whole.nbytes() + columns
    cache.crop(-2 * N)
    plain = logits_in_calls(model, ids[:, : -2 * N], [18 * N + 3])[1]
    assert_same_state(cache.layers[0].state.pending, plain.layers[0].state.pending, 1e-10)
    logits_in_calls(model, ids[:, :3], [3], cache)
    with pytest.raises(ValueError, match=r"crop\(-4\): 3 columns were recorded"):
        cache.crop(-4)


def test_past_recording_ends_with_a_copy(tmp_path: Path) -> None:
    """Sliding layers keep more than their window for `crop`; a fork and a file continue without it."""
    model, ids, more = tiny_llm("gemma3"), prompt(1, 5 * N), prompt(1, N + 3, seed=2)
    cache = InfiniCache(model)
    cache.activate_past_recording()
    logits_in_calls(model, ids, [4 * N, N], cache)
    cache.save(tmp_path / "cache.safetensors")
    plain = logits_in_calls(model, ids, [4 * N, N])[1]
    loaded = InfiniCache.load(tmp_path / "cache.safetensors", model)
    expected = logits_in_calls(model, more, [3, N], plain.fork())[0]
    for name, copied in (("fork", cache.fork()), ("file", loaded), ("itself", cache)):
        assert_close(logits_in_calls(model, more, [3, N], copied)[0], expected, 1e-10, name)
    assert cache.fork().nbytes() == loaded.nbytes() <= logits_in_calls(model, more, [3, N], plain)[1].nbytes()


def test_what_sliding_layers_keep_for_crop_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "ROLLBACK", 2 * N)
    model, cache = tiny_llm("gemma3"), InfiniCache(tiny_llm("gemma3"))
    cache.activate_past_recording()
    ids = prompt(1, 40 * N)
    logits_in_calls(model, ids, [N] * 40, cache)
    kept = [layer for layer in cache.layers if layer.is_sliding]
    assert kept and all(layer.keys.shape[2] <= layer.sliding_window - 1 + 5 * N for layer in kept)
    cache.crop(-2 * N)
    plain = logits_in_calls(model, ids[:, : -2 * N], [38 * N])[1]
    after = prompt(1, N, seed=3)
    assert_close(
        logits_in_calls(model, after, [N], cache)[0], logits_in_calls(model, after, [N], plain)[0], 1e-10, "after"
    )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_crop_without_recording_is_refused(name: str) -> None:
    cache = logits_in_calls(tiny_llm(name), prompt(1, 5 * N), [5 * N])[1]
    cache.crop(0)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="pass a negative number"):
        cache.crop(3)


@pytest.mark.parametrize(
    "forget",
    [
        lambda cache: cache.crop(-2),
        lambda cache: cache.crop(0),
        lambda cache: cache.detach(),
        lambda cache: cache.to("cpu"),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    ],
    ids=["crop", "crop 0", "detach", "to", "reorder"],
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_crop_beyond_what_is_recorded_changes_nothing(name: str, forget: Any) -> None:
    """If nothing was recorded since, neither layers with a memory nor sliding ones are cropped."""
    model, more, cache = tiny_llm(name), prompt(2, 4, seed=3), InfiniCache(tiny_llm(name))
    cache.activate_past_recording()
    logits_in_calls(model, prompt(2, 2 * N + 4), [2 * N + 4], cache)
    forget(cache)
    expected, columns = logits_in_calls(model, more, [4], cache.fork())[0], cache.columns
    with pytest.raises(ValueError, match=r"crop\(-3\): 0 columns were recorded since the last crop"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [columns] * len(cache.layers)
    assert_close(logits_in_calls(model, more, [4], cache)[0], expected, 1e-10, "after the refusal")
    # Reads are recorded again from here on.
    cache.crop(-4)
    assert_close(logits_in_calls(model, more, [4], cache)[0], expected, 1e-10, "after a crop")


def test_rows_are_picked_repeated_and_forgotten() -> None:
    model, ids = tiny_llm(), prompt(3, N + 2)
    cache, more = logits_in_calls(model, ids, [N + 2])[1], prompt(1, 3, seed=1)
    whole = logits(model, torch.cat([ids, more.repeat(3, 1)], 1))[:, -3:]
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        other = cache.fork()
        change(other)
        again = logits_in_calls(model, more.repeat(len(rows), 1), [3], other)[0]
        assert_close(again, whole[rows], 1e-10, f"rows {rows}")
        assert other.batch_size == len(rows)
    cache.reset()
    assert cache.columns == 0 and cache.nbytes() == 0
    assert_close(logits_in_calls(model, ids, [N + 2], cache)[0], logits(model, ids), 1e-10, "anew")


def test_written_by_models_alone() -> None:
    cache = InfiniCache(tiny_llm())
    with pytest.raises(ValueError, match="written by an injected model"):
        cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)


def test_inference_mode_and_no_grad_take_turns() -> None:
    model, ids = tiny_llm(), prompt(1, 2 * N)
    whole = logits(model, ids)
    cache = InfiniCache(model)
    parts = []
    for i, part in enumerate(ids.split(3, 1)):
        with torch.inference_mode() if i % 2 else torch.no_grad():
            parts.append(model(part, past_key_values=cache).logits)
    assert_close(torch.cat(parts, 1), whole, 1e-10, "logits")


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param("llama", {}, id="paper"), pytest.param("llama", ADDITIONS, id="all"), *_STOCK],
)
def test_a_cache_goes_on_in_another_dtype(name: str, options: dict[str, Any]) -> None:
    """Read under autocast, or by the model before it was cast."""
    model, ids = tiny_llm(name, dtype=torch.float32, **options), prompt(1, 2 * N + 3)
    half = copy.deepcopy(model).to(torch.bfloat16)
    expected = logits(model, ids)[:, -3:]
    for cut in (2 * N, 2 * N - 2):
        for reader, autocast, then in ((model, True, model), (model, False, half), (half, False, model)):
            cache = InfiniCache(model)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                reader(ids[:, :cut], past_key_values=cache)
            for calls in ([len(ids[0]) - cut], [len(ids[0]) - cut - 1, 1]):
                found = logits_in_calls(then, ids[:, cut:], calls, cache.fork())[0][:, -3:]
                assert found.dtype == then.dtype
                assert_close(found.float(), expected, 0.1, "logits")


def interrupted(model: Any, cache: InfiniCache, ids: torch.Tensor, gradients: bool = False) -> InfiniCache:
    """The cache after a call that is interrupted in the last layer."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[-1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(gradients):
        model(ids, past_key_values=cache, use_cache=True)
    hook.remove()
    return cache


@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "gradients"])
@pytest.mark.parametrize(("name", "options"), [pytest.param("llama", {}, id="llama"), *_STOCK])
def test_a_cache_whose_call_was_interrupted_is_refused(
    name: str, options: dict[str, Any], gradients: bool, tmp_path: Path
) -> None:
    """Its windows, or its layers without a memory, may hold a part of the text twice. No file has that either."""
    model, ids = tiny_llm(name, **options), prompt(1, 3 * N)
    cache = logits_in_calls(model, ids[:, : N + 3], [N + 3])[1]
    before = cache.fork()
    interrupted(model, cache, ids[:, N + 3 :], gradients)
    if gradients and (name, options) == ("llama", {}):
        # Gradients make all layers with a memory write to copies.
        before = cache
    else:
        message = "an earlier call with this cache was interrupted"
        with pytest.raises(ValueError, match=message), torch.no_grad():
            model(ids[:, N + 3 :], past_key_values=cache)
        with pytest.raises(ValueError, match=message):
            cache.save(tmp_path / "cache.safetensors")
        assert not list(tmp_path.iterdir())
    found = logits_in_calls(model, ids[:, N + 3 :], [2 * N - 3], before)[0]
    # Gemma 2's softmax computes in float32.
    assert_close(found, logits(model, ids)[:, N + 3 :], 1e-6, "logits from the fork")
    # A cache that forgets everything forgets this, too.
    cache.reset()
    assert_close(logits_in_calls(model, ids, [3 * N], cache)[0], logits(model, ids), 1e-6, "after a reset")


@pytest.mark.parametrize("recording", [False, True])
def test_a_first_call_that_fails_leaves_no_rows(recording: bool, tmp_path: Path) -> None:
    """Out of memory with eight rows, again with four."""
    model, ids = tiny_llm(), prompt(4, N + 3)
    cache = InfiniCache(model)
    if recording:
        cache.activate_past_recording()
    interrupted(model, cache, prompt(8, N + 3), gradients=True)
    assert cache.batch_size == -1 and cache.columns == 0
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.save(tmp_path / "cache.safetensors")
    assert_close(logits_in_calls(model, ids, [N + 3], cache)[0], logits(model, ids), 1e-10, "fewer rows")
    if recording:
        cache.crop(-4)
        found = logits_in_calls(model, ids[:, -4:], [4], cache)[0]
        assert_close(found, logits(model, ids)[:, -4:], 1e-10, "after a crop")
