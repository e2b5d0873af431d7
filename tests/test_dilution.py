"""The half-dilution length against a loop over tokens."""

import statistics

import pytest
import torch
from helpers import SEGMENT, make_model, random_ids

from infini.dilution import half_dilution
from infini.ops.reference import sigma


@pytest.mark.parametrize("n_kv_heads", [None, 1])
def test_half_dilution_is_the_ratio_of_weights(n_kv_heads):
    model = make_model({"name": "infini_linear"}, n_kv_heads=n_kv_heads)
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
                looked_for = sum(weights[2:5])
                ratios.append(looked_for / statistics.fmean(weights[SEGMENT : 3 * SEGMENT]))
        expected = sorted(ratios)[1]
        assert found[0][head] == pytest.approx(expected, rel=1e-4)


def test_a_model_without_memory_has_none():
    model = make_model({"name": "local", "rope_base": 10000.0})
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert half_dilution(model, random_ids(1, 4), mask, mask, mask) == []
