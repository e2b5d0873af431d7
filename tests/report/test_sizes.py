"""What a model carries from segment to segment, counted as in the paper's Table 2."""

from __future__ import annotations

from report_runs import make_eval

from infini.records import RunRecord
from infini.report.text_measures import carried_floats, xl_cache


def test_what_a_pretrained_model_keeps_is_counted() -> None:
    """Keys and values of its whole context, as for full attention; those of the segment before are an XL cache."""
    dims = {"d_key": 64, "n_heads": 9, "n_kv_heads": 3, "n_layers": 30, "segment_length": 512}

    def run(most: int | None = 8192, family: str = "llama", **options: str) -> RunRecord:
        model = {"name": "llm", "base": "smollm2", **options}
        made = make_eval("llm", 1, parent=None, cost={"state_floats": 0})
        made.config |= {"model": model, "dims": dims, "scale": {"eval_max_tokens": most}}
        made.environment["base"] = {"family": family}
        return made

    whole = run(memory="full", window="segment")
    assert carried_floats(whole, whole.config) == 2 * 64 * 3 * 30 * (8192 - 512)
    assert xl_cache(whole, None) is None
    for unknown in (run(None, memory="full"), run(family="gemma3", memory="full")):
        assert carried_floats(unknown, unknown.config) is None
    previous = run(memory="none", window="previous")
    assert (carried_floats(previous, previous.config), xl_cache(previous, None)) == (0, 512)
    assert xl_cache(run(memory="none", window="segment"), None) is None
