"""Tiny random language models of every family that can be injected, and of their odder variants."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from infini.pretrained.llm import InfiniCache, inject

N = 8
"""Segment length of the tests."""
VOCABULARY = 61
GATE = -0.5
"""A gate that weighs both local attention and the memory."""

ADDITIONS: dict[str, Any] = {"window": "previous", "sinks": 2, "memory_decay": 4, "input_gate": "sigmoid"}
"""All additions to the paper."""
SHARED = pytest.mark.parametrize(
    ("options", "name"),
    [
        pytest.param({}, "llama", id="paper-llama", marks=pytest.mark.slow),
        pytest.param(ADDITIONS, "llama", id="all-llama"),
        pytest.param({}, "gemma3", id="paper-gemma3"),
        pytest.param(ADDITIONS, "gemma3", id="all-gemma3", marks=pytest.mark.slow),
    ],
)
"""All additions in one family and sliding layers in another; the other two combinations are slow."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_HEAD: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8}
_GEMMA3: dict[str, Any] = {**_HEAD, "num_hidden_layers": 3, "sliding_window": 5}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "rope_theta": 1e4,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4,
    "rope_theta": 1e4,
}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
    "rope_theta": 1e4,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama_llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama_linear_biased": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, "attention_bias": True},
    ),
    "llama_dynamic": (
        "Llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
    ),
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": None}),
    "mistral_sliding": ("Mistral", {"head_dim": 8, "sliding_window": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2_sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {**_HEAD, "sliding_window": 5}),
    "gemma3": (
        "Gemma3Text",
        {**_GEMMA3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "olmo2": ("Olmo2", {}),
    "phi3": (
        "Phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3_longrope": (
        "Phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 64,
            "rope_parameters": _LONG,
        },
    ),
}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "olmo2", "phi3"]
"""One variant of each family."""


@functools.cache
def _base(name: str, sliding_window: int | None) -> Any:
    family, options = VARIANTS[name]
    if sliding_window is not None:
        options = {**options, "sliding_window": sliding_window}
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **options})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh weights are too small for attention to matter.
            parameter.normal_(0, 0.25) if parameter.dim() == 2 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tiny_base(name: str = "llama", dtype: torch.dtype = torch.float64, sliding_window: int | None = None) -> Any:
    """A stock model of a variant, the same weights every time. sliding_window: another one."""
    return copy.deepcopy(_base(name, sliding_window)).to(dtype)


def tiny_llm(name: str = "llama", rule: Any = "delta", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """The same with a memory over segments of N tokens. Input gates write some tokens more than others."""
    model = inject(tiny_base(name, dtype), N, rule, **{"gate_init": GATE, **options}).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "infini_gate.input" in part:
                parameter.copy_(torch.linspace(-2, 2, parameter.numel()).view(parameter.shape))
    return model


def write_tiny_base(folder: Path) -> Path:
    """A folder with a tiny Llama and a byte-level tokenizer that merges nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[0], pad_token=special[0]
    )
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260, num_key_value_heads=1, bos_token_id=0, eos_token_id=0, pad_token_id=0, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def prompt(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids [rows, tokens], none of them special."""
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded(
    lengths: list[int], seed: int = 0, side: str = "left"
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Prompts of these lengths apart, and together: (prompts, ids, attention mask)."""
    prompts = [prompt(1, n, seed + i)[0] for i, n in enumerate(lengths)]
    most = max(lengths)
    ids = torch.zeros(len(lengths), most, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(prompts):
        span = slice(most - len(row), None) if side == "left" else slice(None, len(row))
        ids[i, span], mask[i, span] = row, 1
    return prompts, ids, mask


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits of one forward pass without a cache."""
    return model(ids, use_cache=False, **options).logits  # type: ignore[no-any-return]


@torch.no_grad()
def logits_in_calls(model: Any, ids: torch.Tensor, calls: list[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
    """(logits, cache) of calls of these many tokens, one after the other."""
    cache = InfiniCache(model.config) if cache is None else cache
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(calls, 1)]
    return torch.cat(parts, 1), cache


def greedy(model: Any, ids: torch.Tensor, new: int, **options: Any) -> torch.Tensor:
    """The tokens of stock generate(), with the prompt; without a mask nothing is padding, not even the pad token."""
    if "past_key_values" not in options:
        options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=new, do_sample=False, **options)  # type: ignore[no-any-return]


@torch.no_grad()
def greedy_by_hand(model: Any, ids: torch.Tensor, new: int) -> torch.Tensor:
    """The same by whole forward passes without a cache."""
    for _ in range(new):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], 1)
    return ids
