"""The half-dilution length against a loop over tokens."""

import re
import statistics

import pytest
import torch
from command_runner import Runner, read_by
from helpers import SEGMENT, make_model, random_ids, tiny_dims

from infini.evaluation import dilution
from infini.evaluation.dilution import half_dilution
from infini.models import build_model
from infini.nn.ops.reference import input_gate as input_gate_by_oracle
from infini.nn.ops.reference import sigma
from infini.tasks.passkey import evaluation
from infini.tasks.passkey.evaluation import measure_dilution
from infini.tasks.passkey.prompt import PasskeyTemplate, word_tokenizer

PROMPTS = ["dims.segment_length=32", "recipe.segments_per_sequence=8", "recipe.curriculum=null", "task.examples=1"]


@pytest.mark.parametrize("input_gate", [None, "sigmoid"])
@pytest.mark.parametrize("n_kv_heads", [None, 1, 2])
def test_half_dilution_is_the_ratio_of_weights(n_kv_heads, input_gate):
    model = make_model({"name": "infini_linear", "input_gate": input_gate}, n_heads=4, n_kv_heads=n_kv_heads)
    ids = random_ids(2, 4 * SEGMENT)
    needle, filler, query = (torch.zeros(ids.shape, dtype=torch.bool) for _ in range(3))
    needle[:, 2:5] = True
    filler[:, SEGMENT : 3 * SEGMENT] = True
    query[:, -2:] = True
    found = half_dilution(model, ids, needle, filler, query)
    attention = model.blocks[0].attention
    x = model.blocks[0].attention_norm(model.embedding(ids))
    groups = attention.n_heads // attention.n_kv_heads
    for head in range(attention.n_heads):
        ratios = []
        for row in range(2):
            q = attention.q_proj(x[row]).unflatten(-1, (attention.n_heads, -1))[:, head]
            k = attention.k_proj(x[row]).unflatten(-1, (attention.n_kv_heads, -1))[:, head // groups]
            for at in (-2, -1):
                weights = [float((sigma(q[at]) * sigma(k[token])).sum()) for token in range(len(k))]
                if input_gate:
                    gate = (attention.input_weight[head // groups], attention.input_bias[head // groups])
                    weights = [w * float(f) for w, f in zip(weights, input_gate_by_oracle(k, *gate), strict=True)]
                looked_for = sum(weights[2:5])
                ratios.append(looked_for / statistics.fmean(weights[SEGMENT : 3 * SEGMENT]))
        expected = sorted(ratios)[1]
        assert found[0][head] == pytest.approx(expected, rel=1e-4)


def test_a_model_without_memory_has_none():
    model = make_model({"name": "local", "rope_base": 10000.0})
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert half_dilution(model, random_ids(1, 4), mask, mask, mask) == []


@pytest.mark.parametrize("segment", [16, 100])
def test_filler_that_saw_the_key_is_not_filler(segment, monkeypatch):
    """Filler behind the key in the key's own segment also writes about the key, and does not grow with the prompt."""
    masks: dict[str, torch.Tensor] = {}
    rows: list[torch.Tensor] = []

    def keep_masks(model, ids_BT, needle_BT, filler_BT, query_BT, advance):
        masks.update(needle=needle_BT, filler=filler_BT, query=query_BT)
        rows.extend(ids_BT)
        return []

    monkeypatch.setattr(evaluation, "half_dilution", keep_masks)
    tokenizer = word_tokenizer()
    template = PasskeyTemplate(tokenizer.encode, digits=5)
    model = build_model({"name": "infini_linear"}, tiny_dims(segment_length=segment), tokenizer.vocab_size)
    measure_dilution(template, model, tokenizer.bos_id, seed=1)
    for row in range(len(masks["filler"])):
        segments = {name: set((mask[row].nonzero().flatten() // segment).tolist()) for name, mask in masks.items()}
        assert segments["filler"], "there is some filler"
        assert max(segments["needle"]) < min(segments["filler"])
        assert max(segments["filler"]) < min(segments["query"])
        for number in segments["filler"]:
            assert masks["filler"][row, number * segment : (number + 1) * segment].all()
        needle, filler, query = (mask[row].nonzero().flatten() for mask in masks.values())
        sentence = tokenizer.decode(rows[row][needle].numpy())
        key = "".join(re.findall(r"\d", sentence)[:5])
        assert rows[row][needle].tolist() == template.key_tokens(key).tolist()
        # The question's last word asks for the first digit, and its words are no filler.
        assert rows[row][query].tolist() == [template.question[-1], *template.answer_tokens(key)[:-1]]
        assert int(filler.max()) <= int(query[0]) - len(template.question)


def test_rows_may_be_read_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model({"name": "infini_linear"})
    ids = random_ids(3, 4 * SEGMENT)
    masks = [torch.zeros(ids.shape, dtype=torch.bool) for _ in range(3)]
    for mask, columns in zip(masks, (slice(2, 5), slice(SEGMENT, 3 * SEGMENT), slice(-2, None)), strict=True):
        mask[:, columns] = True
    whole, calls = half_dilution(model, ids, *masks), []
    model.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    monkeypatch.setattr(dilution, "TOKENS_PER_CALL", 9 * SEGMENT)
    shown: list[float] = []
    in_parts = half_dilution(model, ids, *masks, shown.append)
    assert calls == shown == [2, 1]
    assert [x for layer in in_parts for x in layer] == pytest.approx([x for layer in whole for x in layer], rel=1e-5)


def test_a_memory_that_decays_has_no_half_dilution(infini: Runner) -> None:
    """There a token's weight depends on how long ago it was written, and old filler weighs nothing."""
    for decay, known in (("null", True), ("4", False)):
        asked = ["task=passkey", *PROMPTS, f"model.memory_decay={decay}"]
        infini("train", *read_by(["train"], asked))
        infini("eval", *asked, "length=256", "depth=start")
        assert ("half_dilution" in infini.records("eval")[-1].results) is known
