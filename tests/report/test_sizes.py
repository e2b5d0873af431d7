"""Sizes of what a model carries from segment to segment, counted as in the paper's Table 2."""

from __future__ import annotations

import pytest
from report_runs import make_eval
from tiny_llms import tiny_base

from infini.config.compose import compose
from infini.models import build_model
from infini.nn import protocols
from infini.pretrained.llm.language_model import PretrainedLM
from infini.records import RunRecord, carried_floats, xl_cache


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


@pytest.mark.parametrize("model", ["full", "local", "infini_linear"])
def test_a_model_says_what_older_records_leave_to_the_configuration(model: str) -> None:
    cfg = compose(["task=pg19", f"model={model}", "dims.segment_length=16"])
    n = 5
    built = build_model(cfg.model, cfg.dims, 300)
    run = make_eval(model, 1, cost={"state_floats": built.state_floats(n)})
    older = carried_floats(run, {"model": dict(cfg.model), "dims": vars(cfg.dims)})
    run.cost["carried_floats"] = said = protocols.carried_floats(built, n)
    assert carried_floats(run, {}) == older == said
    assert (said == 0) == (model == "local")


def test_a_base_says_what_it_keeps() -> None:
    llama, gemma = (PretrainedLM(tiny_base(name), 16, "full") for name in ("llama", "gemma3"))
    config = llama.llm.config
    each = 2 * config.head_dim * config.num_key_value_heads * config.num_hidden_layers
    assert protocols.carried_floats(llama, 5) == each * 4 * 16
    run = make_eval("llm", 1, cost={"carried_floats": protocols.carried_floats(gemma, 5)})
    assert carried_floats(run, {}) is None
