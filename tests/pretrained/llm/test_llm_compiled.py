"""torch.compile of decoding."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close
from tiny_llms import ADDITIONS, N, logits, prompt, tiny_llm
from torch._dynamo.testing import CompileCounter

from infini.pretrained.llm import InfiniCache


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, ADDITIONS], ids=["paper", "all"])
def test_compiled_decoding(options: dict[str, object]) -> None:
    """Norms, projections and feed-forward layers are compiled, once; attention and its plan stay as they are."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model, ids = tiny_llm(dtype=torch.float32, **options), prompt(2, 4 * N)
    compiled = torch.compile(model, backend=counter, dynamic=True)
    cache, parts, graphs = InfiniCache(model), [], set()
    with torch.no_grad():
        parts.append(model(ids[:, :N], past_key_values=cache).logits)
        for t in range(N, 4 * N):
            parts.append(compiled(ids[:, t : t + 1], past_key_values=cache).logits)
            if t > N + 2:
                graphs.add(counter.frame_count)
    assert_close(torch.cat(parts, 1), logits(model, ids), 1e-5, "logits")
    assert len(graphs) == 1 and counter.frame_count > 2, f"graphs on the way: {graphs}"
