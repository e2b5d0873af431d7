"""Cost of long sources in an encoder-decoder: cross-attention to all states, and Unlimiformer's search."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import torch

from infini.bench.training import VOCABULARY, Setting, print_table, quartiles, wait
from infini.pretrained.seq2seq import SourceReader
from infini.system.devices import autocast, peak_memory_bytes, reset_peak_memory
from infini.system.progress import progress_bar

WAYS = {
    "full": ["model.unlimiformer=none"],
    "exact": ["model.unlimiformer=test", "model.search=exact"],
    "approximate": ["model.unlimiformer=test", "model.search=approximate"],
}
"""Kind of cross-attention -> settings of the model."""
NEW_TOKENS = 32
"""Tokens timed after the first one, which also projects all states or makes the index."""


@torch.no_grad()
def source_costs(setting: Setting) -> dict[str, Any]:
    """Time and memory for every length of `suite.source_tokens`, on random tokens.

    Seconds of the encoder; for each kind of cross-attention seconds of the first token, milliseconds of later ones, and
    peak memory above the use before. All kinds have the same weights and states. A kind whose library is not installed
    is left out.
    """
    cfg, device, console = setting.cfg, setting.device, setting.console
    columns = {"tokens": ",", "encoded in s": ".2f", "cross-attention": "", "first token s": ".3f", "later ms": ".2f"}
    shown = []
    models = {way: setting.build("bart", settings).eval() for way, settings in WAYS.items() if _available(way)}
    rows: dict[str, Any] = {}
    what = f"{', '.join(models)} cross-attention to sources of up to {max(cfg.suite.source_tokens):,} tokens"
    with (
        progress_bar(what, len(cfg.suite.source_tokens) * (1 + len(models)), console.is_terminal, between=True) as step,
        autocast(cfg.parallel.precision, device),
    ):
        for length in cfg.suite.source_tokens:
            ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(cfg.seed)).to(device)
            begin = time.perf_counter()
            states = next(iter(models.values())).encode(ids, torch.ones_like(ids))
            wait(device)
            encoded = time.perf_counter() - begin
            step(1)
            found: dict[str, Any] = {}
            for way, model in models.items():
                base = reset_peak_memory(device)
                reader = SourceReader(model, (states, None), 0)
                seconds = []
                for _ in range(1 + NEW_TOKENS):
                    begin = time.perf_counter()
                    logits, state = reader.next_logits()
                    reader = SourceReader(model, state, int(logits.argmax()))
                    seconds.append(time.perf_counter() - begin)
                found[way] = {
                    "first_seconds": seconds[0],
                    "milliseconds": [1000 * value for value in quartiles(seconds[1:])],
                    "peak_bytes": peak_memory_bytes(device) - base,
                }
                step(1)
            rows[str(length)] = {"encode_seconds": encoded, "ways": found}
            for way, values in found.items():
                low, median, high = values["milliseconds"]
                used, middle = values["peak_bytes"] / 2**20, f"{low:.2f}-{high:.2f}"
                shown.append((length, encoded, way, values["first_seconds"], median, middle, used))
    columns |= {"quartiles": "", "peak MB": ".0f"}
    print_table(console, "an encoder-decoder's source (BART)", columns, shown)
    return {"lengths": rows, "new_tokens": NEW_TOKENS, "k": next(iter(models.values())).config.k}


def _available(way: str) -> bool:
    return way != "approximate" or find_spec("faiss") is not None
