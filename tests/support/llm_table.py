"""Tests of injected language models, by family. `python tests/support/llm_table.py` writes them to
docs/reference/llm_families.md.

A cell or a line names a test, and `tests/pretrained/llm/test_llm_table.py` checks that all of them exist.
"""

from __future__ import annotations

from pathlib import Path

from tiny_llms import FAMILIES, VARIANTS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "llm_families.md"
FOLDER = "tests/pretrained/llm"
BY_FAMILY, OF_FAULTS = f"{FOLDER}/test_llm_families.py", f"{FOLDER}/test_llm_faults.py"

PROPERTIES = {
    "equal within a segment": ("test_equals_the_base_within_a_segment", "{family}"),
    "decode = forward": ("test_decode_equals_forward_at_every_position", "delta-{family}"),
    "padding": ("test_padded_rows_are_as_alone", "{family}-paper"),
    "beams": ("test_beams_are_those_of_whole_forward_passes", "{family}"),
    "chunks": ("test_prefill_in_chunks", "{family}"),
    "save, load": ("test_saved_and_loaded_bit_for_bit", "{family}"),
    "checkpointing": ("test_checkpointed_activations_give_the_same_gradients", "{family}"),
    "LoRA": ("test_lora_trains_adapters_gates_and_norms_alone", "{family}"),
}
"""Property -> its test in BY_FAMILY, and the parameters of a family."""

MEANINGS = {
    "equal within a segment": "on inputs of at most one segment the logits are the base's: bit for bit in float64, to "
    "1e-5 in float32",
    "decode = forward": "token by token, and in calls that end before, at and after a segment boundary, the logits of "
    "every position are those of one forward pass",
    "padding": "a batch with rows of many lengths, padded on either side, generates what each row generates alone",
    "beams": "beam search with reordered rows finds what it finds without a cache",
    "chunks": "`prefill_chunk_size` changes nothing",
    "save, load": "`save_pretrained` and `AutoModelForCausalLM.from_pretrained`, bit for bit; the base's weights load "
    "into the stock class",
    "checkpointing": "recomputed activations give the same gradients, and every beta gets one",
    "LoRA": "peft trains adapters, gates and norms and nothing else, and its files give the same logits again",
}

FAULTS = {
    "lucidrains/infini-transformer-pytorch": {
        "dropped prompt segments: `generate` used only the last segment of a prompt": (
            "lucidrains_prompt_segments_are_not_dropped"
        ),
        "the gate's direction reversed": "lucidrains_gate_weights_the_memory",
        "a gate that begins saturated": "lucidrains_gate_is_not_saturated_at_the_start",
    },
    "Beomi/InfiniTransformer": {
        "last segment written twice where the prompt is a multiple of the segment length": (
            "beomi_prompt_of_whole_segments_is_written_once"
        ),
        "memory not read while decoding": "beomi_memory_is_read_while_decoding",
        "mispaired heads: with grouped queries, heads read the memory of another key-value head": (
            "beomi_grouped_query_heads_read_their_own_memory"
        ),
        "memory in float16 overflows": "beomi_memory_in_half_precision_does_not_overflow",
        "no epsilon: a normaliser of 0 divides": "beomi_a_normaliser_of_zero_divides_nothing",
        "memory detached at every segment": "beomi_memory_is_not_detached_between_segments",
    },
    "NousResearch/infini-attention, huggingface/nanotron": {
        "padding in the memory": "nous_padding_reaches_no_memory",
        "no cache of keys and values": "nous_decoding_uses_the_cache",
        "memory created again in every forward pass": "nanotron_memory_is_carried_from_call_to_call",
    },
    "dingo-actual/infini-transformer": {
        "not causal across segments": "dingo_no_leak_across_segments",
        "state on another device than the input": "dingo_state_on_the_inputs_device",
    },
    "jlamprou/Infini-Attention": {
        "rotary embedding before the memory": "jlamprou_rotary_not_in_memory",
        "delta rule never used": "jlamprou_delta_is_enabled",
        "one beta for all heads": "jlamprou_one_beta_a_query_head",
        "state shared by the rows of a batch": "jlamprou_state_not_shared_across_batch",
    },
    "traps of transformers": {
        "`attn_implementation` replaces the memory": "transformers_attn_implementation_does_not_replace_the_memory",
        "a kernel without a mask cuts keys where they outnumber the queries": (
            "transformers_continued_segments_see_all_their_keys"
        ),
        "Phi-3 discards its cache beyond its original length": (
            "transformers_phi3_keeps_its_cache_beyond_its_original_length"
        ),
    },
}
"""The implementation that had a fault -> the fault -> its test in OF_FAULTS, without test_."""


def named_by_family() -> set[str]:
    """Names of the tests, with parameters, that the table names."""
    return {_cell(name, family) for name in PROPERTIES for family in FAMILIES}


def named_by_fault() -> set[str]:
    """Names of the tests of faults, without parameters."""
    return {f"test_{test}" for faults in FAULTS.values() for test in faults.values()}


def _cell(name: str, family: str) -> str:
    test, parameters = PROPERTIES[name]
    return f"{test}[{parameters.format(family=family)}]"


def page() -> str:
    """The text of docs/reference/llm_families.md."""
    head = ["Family", *PROPERTIES]
    rows = [
        [VARIANTS[family][0].removesuffix("Text"), *(f"`{_cell(name, family)}`" for name in PROPERTIES)]
        for family in FAMILIES
    ]
    lines = [
        "# Injected language models: what is tested",
        "",
        "Written by `tests/support/llm_table.py`. Every cell is a test of tiny random models that runs in `make test`,",
        f"in `{BY_FAMILY}`; run one as",
        f"`pytest '{BY_FAMILY}::{_cell('beams', 'llama')}'`.",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(f"- **{name}**: {meaning}." for name, meaning in MEANINGS.items()),
        "",
        "The same file has more variants (rotary embeddings of type yarn, llama3, linear, dynamic and longrope;",
        "sliding layers; biases), both update rules, and the options `window=previous`, `sinks`, `memory_decay` and",
        "`input_gate`.",
        "Further combinations of the same tests run in `make test-slow`.",
        "",
        "## Faults of other implementations",
        "",
        f"Each has a test in `{OF_FAULTS}`, named after where it was seen.",
        "",
        "| Seen in | Fault | Test |",
        "| --- | --- | --- |",
        *(
            f"| {where} | {fault} | `test_{test}` |"
            for where, faults in FAULTS.items()
            for fault, test in faults.items()
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
