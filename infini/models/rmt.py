"""Recurrent Memory Transformer (Bulatov et al. 2022): memory tokens before and after every segment.

A segment is read as [memory; tokens; memory]. The last layer's outputs at the second memory are the memory of the next
segment. Attention is causal, but bidirectional inside each memory. A document begins with learned vectors. Gradients
flow back through the memory for bptt_depth segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infini.models import register
from infini.nn.attention import at_least_one
from infini.nn.host import to_device, to_numpy
from infini.nn.protocols import Dimensions
from infini.nn.recurrent import Recurrence, RecurrenceConfig, vectors


class RMT(Recurrence):
    """memory_tokens: number of vectors in the memory."""

    memory_sees_itself = True

    def __init__(self, dims: Dimensions, vocab_size: int, memory_tokens: int, **options: object) -> None:
        at_least_one(memory_tokens=memory_tokens)
        super().__init__(dims, vocab_size, **options)  # type: ignore[arg-type]
        # A segment writes the whole memory.
        self.memory_tokens = self.memory_size = self.summary_vectors = memory_tokens
        self.first_memory = vectors(memory_tokens, dims.d_model)

    def prefix(self, memory_BMD: Tensor, writes_B: Tensor) -> tuple[Tensor, None]:
        first = self.first_memory.view(memory_BMD.shape[1:]).to(memory_BMD.dtype)
        begins_B = to_device(to_numpy(writes_B) == 0, memory_BMD.device)
        return torch.where(begins_B[:, None, None], first, memory_BMD), None

    def write_tokens(self, prefix_BPD: Tensor) -> Tensor:
        return prefix_BPD

    def updated(self, memory_BMD: Tensor, written_BWD: Tensor) -> Tensor:
        return written_BWD


@dataclass
class RMTConfig(RecurrenceConfig):
    """Options of rmt. memory_tokens: null is 100 for segments of 2,048 tokens, as in the paper, and proportional for
    others, at least 1."""

    memory_tokens: int | None = None


@register("rmt", RMTConfig)
def build(config: RMTConfig, dims: Dimensions, vocab_size: int) -> RMT:
    """The model at the sizes of `dims`."""
    tokens = max(1, dims.segment_length * 100 // 2048) if config.memory_tokens is None else config.memory_tokens
    return RMT(dims, vocab_size, tokens, **config.shared)
