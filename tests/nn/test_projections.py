"""The recorded projections of a layer are those with which its memory was read and written."""

from typing import Any

import pytest
import torch
from torch import nn

from infini import InfiniAttention
from infini.nn.ops.memory import sigma
from infini.nn.protocols import recorded

N, HEADS, KEY = 4, 2, 6


class OneLayer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.memory_layers = [InfiniAttention(12, HEADS, KEY, N, **options).double()]


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"qk_norm": True, "n_kv_heads": 1}])
def test_keys_are_those_that_the_memory_adds_up(options: dict[str, Any]) -> None:
    """If there are norms, they differ from the result of the projection."""
    torch.manual_seed(0)
    model = OneLayer(**options)
    (layer,) = model.memory_layers
    x_BTD = torch.randn(2, 3 * N, 12, dtype=torch.float64)
    with recorded(model, "keys") as keys, recorded(model, "queries") as queries:
        state = layer(x_BTD[:, :5])[1]
        _, state = layer(x_BTD[:, 5:], state)
    written_BTGK = sigma(keys[0]).unflatten(-1, (-1, KEY))
    torch.testing.assert_close(written_BTGK.sum(1), state.layers[0].memory.z_BGK)
    torch.testing.assert_close(queries[0].unflatten(-1, (HEADS, KEY)), layer.project_queries(x_BTD))
