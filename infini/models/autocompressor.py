"""AutoCompressors (Chevalier et al. 2023): the summary vectors of earlier segments precede every segment.

A segment is read as [summaries; tokens; summary tokens]. The last layer's outputs at the summary tokens, which are
learned, are the segment's summary vectors. They accumulate as a soft prompt of at most `accumulated` segments; the
oldest are dropped. Gradients flow through at most bptt_depth segments, and in training segments may have random lengths
(see Recurrence).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infini.models import register
from infini.nn.attention import at_least_one
from infini.nn.host import to_device, to_numpy
from infini.nn.protocols import Dimensions
from infini.nn.recurrent import Recurrence, RecurrenceConfig, vectors


class AutoCompressor(Recurrence):
    """summary_tokens: summary vectors per segment. accumulated: segments whose vectors are kept (m in Table 1)."""

    def __init__(
        self, dims: Dimensions, vocab_size: int, summary_tokens: int, accumulated: int, **options: object
    ) -> None:
        at_least_one(summary_tokens=summary_tokens, accumulated=accumulated)
        super().__init__(dims, vocab_size, **options)  # type: ignore[arg-type]
        self.summary_tokens, self.accumulated = summary_tokens, accumulated
        # A segment's writes are appended to the vectors of earlier segments.
        self.memory_size, self.summary_vectors = summary_tokens * accumulated, summary_tokens
        self.summaries = vectors(summary_tokens, dims.d_model)

    def prefix(self, memory_BMD: Tensor, writes_B: Tensor) -> tuple[Tensor, Tensor | None]:
        M = memory_BMD.shape[1]
        exists_BM = np.arange(M) >= M - to_numpy(writes_B)[:, None] * self.summary_tokens
        return memory_BMD, None if exists_BM.all() else to_device(exists_BM, memory_BMD.device)

    def write_tokens(self, prefix_BPD: Tensor) -> Tensor:
        shape = (len(prefix_BPD), self.summary_tokens, prefix_BPD.shape[2])
        return self.summaries.view(shape[1:]).to(prefix_BPD.dtype).expand(shape)

    def updated(self, memory_BMD: Tensor, written_BWD: Tensor) -> Tensor:
        return torch.cat([memory_BMD, written_BWD], 1)[:, self.summary_tokens :]


@dataclass
class AutoCompressorConfig(RecurrenceConfig):
    """Options of autocompressor. See AutoCompressor and Recurrence. summary_tokens: null is 50 for segments of 2,048
    tokens, as in their paper, and proportional for others, at least 1."""

    summary_tokens: int | None = None
    accumulated: int = 8
    random_segments: bool = False
    bptt_depth: int | None = 2


@register("autocompressor", AutoCompressorConfig)
def build(config: AutoCompressorConfig, dims: Dimensions, vocab_size: int) -> AutoCompressor:
    """The model at the sizes of `dims`."""
    tokens = max(1, dims.segment_length * 50 // 2048) if config.summary_tokens is None else config.summary_tokens
    options = {**config.shared, "random_segments": config.random_segments}
    return AutoCompressor(dims, vocab_size, tokens, config.accumulated, **options)
