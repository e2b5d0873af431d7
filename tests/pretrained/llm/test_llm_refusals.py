"""A model that cannot be injected, or an option out of range, gets one line that says what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_llms import N, logits, logits_in_calls, prompt, tiny_base, tiny_llm

from infini.errors import InputError
from infini.pretrained.llm import inject
from infini.pretrained.llm.inject import resize_segments

KNOWN = (
    "these can be injected: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
    "Gemma2ForCausalLM, Gemma3ForCausalLM, SmolLM3ForCausalLM, Olmo2ForCausalLM, Phi3ForCausalLM"
)
SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 11, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_padding_that_a_cache_has_read_is_not_seen_later(family: str) -> None:
    """Layers without a memory need the mask of earlier columns, or they attend to padding; those with one know it."""
    model = tiny_llm(family)
    ids = torch.randint(4, 60, (2, 15), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad():
        cache = model(ids[:, :12], attention_mask=mask[:, :12], use_cache=True).past_key_values
        right = model(ids[:, 12:], attention_mask=mask, past_key_values=cache.fork()).logits
        if family == "llama":
            torch.testing.assert_close(model(ids[:, 12:], past_key_values=cache.fork()).logits, right)
            return
        with pytest.raises(InputError, match="the cache has read padding, which layers without a memory would see"):
            model(ids[:, 12:], past_key_values=cache.fork())


def test_a_family_with_sinks_as_parameters_is_refused() -> None:
    config = transformers.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(
        ValueError, match="GptOssForCausalLM cannot be injected: its attention sinks are parameters"
    ) as e:
        inject(transformers.GptOssForCausalLM(config), N)
    assert KNOWN in str(e.value) and "\n" not in str(e.value)


def test_an_unknown_family_is_refused() -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11)
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot be injected: the family is not known") as error:
        inject(transformers.GPT2LMHeadModel(config), N)
    assert KNOWN in str(error.value)
    with pytest.raises(ValueError, match="LlamaModel cannot be injected.*did you mean 'LlamaForCausalLM'"):
        inject(tiny_base().model, N)
    with pytest.raises(ValueError, match="Linear cannot be injected"):
        inject(torch.nn.Linear(1, 1), N)
    # A name that looks like another family's is no typing error.
    config = transformers.GPTNeoXConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=11)
    with pytest.raises(ValueError, match="GPTNeoXForCausalLM cannot be injected: the family is not known here; these"):
        inject(transformers.GPTNeoXForCausalLM(config), N)
    with pytest.raises(ValueError, match="InfiniLlamaModel cannot be injected: it lacks the output head; did you mean"):
        inject(tiny_llm().model, N)


def test_a_multimodal_model_is_refused() -> None:
    class Seer(torch.nn.Module):
        config = type("Config", (), {"vision_config": object()})

    with pytest.raises(ValueError, match="Seer cannot be injected: it is multimodal"):
        inject(Seer(), N)


def test_a_model_is_injected_once() -> None:
    with pytest.raises(ValueError, match="InfiniLlamaForCausalLM: has a memory already"):
        inject(tiny_llm(), N)


def test_peft_comes_after() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_base(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="inject the base model first"):
        inject(model, N)


def test_a_bidirectional_model_is_refused() -> None:
    model = tiny_base("gemma3")
    model.config.use_bidirectional_attention = True
    with pytest.raises(ValueError, match="its attention is bidirectional"):
        inject(model, N)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"segment_length": 0}, "segment_length=0: must be at least 1"),
        ("llama", {"segment_length": 8.0}, "segment_length=8.0: must be a whole number"),
        ("llama", {"update_rule": "Delta"}, "update_rule='Delta': must be one of linear, .*; did you mean 'delta'"),
        ("llama", {"window": "both"}, "window='both': must be one of segment, previous"),
        ("llama", {"first_segment": "none"}, "first_segment='none': must be one of local, zero"),
        ("llama", {"sinks": 9}, "sinks=9: must be from 0 to segment_length=8"),
        ("llama", {"memory_decay": 0.5}, "memory_decay=0.5: must be None, or a finite number of segments, at least 1"),
        ("llama", {"memory_decay": True}, "memory_decay=True: must be None, or a finite number of segments"),
        ("llama", {"input_gate": "exp"}, "input_gate='exp': must be one of sigmoid"),
        ("llama", {"input_gate": True}, "input_gate=True: must be one of sigmoid"),
        ("llama", {"gate_init": float("-inf")}, "gate_init=-inf: must be a finite number"),
        ("llama", {"gate_init": True}, "gate_init=True: must be a finite number"),
        ("llama", {"base": 3}, "base=3: must be a text"),
        ("llama", {"layers": [True, False]}, r"layers=\[True, False\]: must be whole numbers"),
        ("llama", {"layers": [2]}, r"layers=\[2\]: name at least one of 0 to 1"),
        ("llama", {"layers": "all"}, "layers='all': must be a list of numbers, or None"),
        ("llama", {"layers": 1}, "layers=1: must be a list of numbers, or None"),
        ("llama", {"layers": [0.5]}, r"layers=\[0.5\]: must be whole numbers"),
        ("llama", {"layers": []}, r"layers=\[\]: name at least one of 0 to 1"),
        ("llama", {"local_attention": "flash"}, "local_attention='flash': must be one of sdpa, eager"),
        ("gemma2", {"local_attention": "sdpa"}, "local_attention='sdpa': this model caps its scores"),
        ("gemma2", {"layers": [0, 1]}, "a token sees 8, and the layers slide over 5: at most that"),
        (
            "mistral_sliding",
            {"window": "previous", "segment_length": 17},
            "a token sees 34, and the layers slide over 32",
        ),
        ("phi3_longrope", {"segment_length": 65}, r"\(longrope\) changes beyond 64 tokens, and a token sees 65"),
        ("llama_dynamic", {"segment_length": 17}, r"\(dynamic\) changes beyond 16 tokens"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inject(tiny_base(name), **{"segment_length": N, **options})


@pytest.mark.parametrize("name", ["llama", "llama_linear_biased", "llama_llama3", "llama_yarn", "gemma3"])
def test_more_positions_than_the_base_was_made_for_are_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Such an embedding has angles for them, which the weights have never seen."""

    def warned() -> list[str]:
        said = [record.getMessage() for record in caplog.records if record.name.startswith("infini")]
        caplog.clear()
        return said

    def injected(segment_length: int, **options: Any) -> Any:
        model = tiny_base(name)
        model.config.max_position_embeddings = 16
        return inject(model, segment_length, **options)

    model = injected(16)
    injected(8, window="previous")
    resize_segments(model, 12)
    assert warned() == []
    for length, window, sinks in ((17, "segment", 0), (16, "segment", 1), (8, "previous", 1)):
        injected(length, window=window, sinks=sinks)
        assert warned() == [
            f"segment_length={length}: with window={window!r} and sinks={sinks} a token sees 17 positions, and the "
            "base was made for max_position_embeddings=16"
        ]
    resize_segments(model, 17)
    assert len(warned()) == 1


def test_layers_that_slide_stay_unless_they_are_named() -> None:
    """All are converted where none is global; named in the config."""
    chosen = {name: tiny_llm(name).config.infini["layers"] for name in ("gemma2", "gemma3", "mistral_sliding")}
    assert chosen == {"gemma2": [1], "gemma3": [1, 2], "mistral_sliding": [0, 1]}
    assert tiny_llm("gemma3", layers=[2]).config.infini["layers"] == [2]
    base = tiny_base("gemma2", sliding_window=3 * N)
    assert inject(base, N, layers=[0]).config.infini["layers"] == [0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_a_global_layer_may_stay_the_bases(name: str) -> None:
    """It then sees everything, and its cache grows."""
    model, ids = tiny_llm(name, layers=[1]), prompt(2, 3 * N + 1)
    found, cache = logits_in_calls(model, ids, [N + 1, 1, 2 * N - 1])
    assert (found - logits(model, ids)).abs().max() < 1e-5
    assert set(cache.memory_layers) == {1}
