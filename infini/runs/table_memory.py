"""`infini table report=table1_memory`: Table 1, with the floats counted in models after reading whole segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infini.config.compose import compose
from infini.config.schema import Config
from infini.models import build_model
from infini.nn.protocols import optional
from infini.nn.state import memory_floats
from infini.records import RunRecord
from infini.report.footprint import Measured, MemoryReport, Symbols, build_memory_report
from infini.report.tables import RenderedReport
from infini.system.progress import progress_bar

VOCABULARY = 16
"""The counts do not depend on the vocabulary."""


def table(
    report: MemoryReport,
    cfg: Config,
    overrides: list[str],
    published: Sequence[RunRecord] = (),
    yours: Sequence[RunRecord] | None = None,
) -> RenderedReport:
    """Build every model of the report at the configuration's sizes, let it read, and count the floats that it carries
    to the next segment. Records are not used."""
    measured: dict[str, Measured] = {}
    with progress_bar("counting", len(report.models)) as advance:
        for model in report.models:
            own = compose([*(text for text in overrides if not text.startswith("model=")), f"model={model}"])
            measured[model] = measure(own, report.segments or own.recipe.segments_per_sequence)
            advance(1)
    return build_memory_report(report, cfg.scale.name, measured)


@torch.no_grad()
def measure(cfg: Config, segments: int) -> Measured:
    """The model of a configuration after reading `segments` whole segments."""
    model = build_model(cfg.model, cfg.dims, VOCABULARY).eval()
    N = cfg.dims.segment_length
    ids, state = torch.arange(N)[None] % VOCABULARY, model.init_state(1)
    for _ in range(segments):
        # One segment per call, because at paper scale the attention scores of all segments take gigabytes.
        state = model.prefill(ids, state)
    dims, options = cfg.dims, cfg.model
    symbols = Symbols(
        N=N,
        S=segments,
        l=dims.n_layers,
        H=dims.n_heads,
        G=dims.n_heads if dims.n_kv_heads is None else dims.n_kv_heads,
        d_model=dims.d_model,
        d_key=dims.d_key,
        d_value=dims.d_key if dims.d_value is None else dims.d_value,
        c=options.get("compressed_segments", 0) * N,
        r=options.get("rate", 1),
        p=optional(model, "summary_vectors"),
        m=options.get("accumulated", 0),
        M=options.get("memory_segments", 0) * options.get("memory_multiple", 1) * N,
    )
    return Measured(symbols, model.state_floats(segments), memory_floats(state), model.receptive_field(segments))
