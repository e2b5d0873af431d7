"""Cost of reading and continuing a prompt in a pretrained language model, with a memory or with its own cache."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from infini.bench.training import Setting, print_table, start_peak, wait
from infini.errors import InputError
from infini.models import base_of, build_model
from infini.nn.state import state_bytes
from infini.system.devices import autocast, peak_memory_bytes
from infini.system.progress import progress_bar

TOKENS_PER_CALL = 4096
"""Tokens per call with a memory, as in `infini generate`. The base reads its prompt in one call, as stock generate()
does. Several calls would need a mask, which makes it slower."""
NEW_TOKENS = 32
"""Tokens generated after the prompt. The prompt is NEW_TOKENS / 2 tokens shorter than its nominal length. So half of
the tokens are generated before the end of a segment, and half after it."""
REPEATS, REPEATED_TOKENS = 3, 16384
"""Number of times that each variant reads a prompt. Prompts longer than REPEATED_TOKENS are read once."""
BASE_CACHE = "own"
"""The variant without a memory. The others are named by their segment length."""


@torch.inference_mode()
def prompt_costs(setting: Setting) -> dict[str, Any]:
    """Time and memory for every length of `suite.prompt_tokens`, on random tokens.

    The variants are the base with its own cache of keys and values, and the base with a memory over segments of each
    length of `suite.prompt_segments`. Measured are the seconds to read the prompt, the milliseconds per token decoded
    greedily after it, the bytes of the cache or state at the end, and the bytes of peak memory above the use before.
    Lists have one value for each repeat.

    Raises InputError if model.base is no language model that can be measured, or if peak memory cannot be reset, as on
    a CPU outside Linux.
    """
    cfg, device, console = setting.cfg, setting.device, setting.console
    ways = _ways(setting)
    lengths = sorted(set(cfg.suite.prompt_tokens))
    base = base_of(cfg.model).describe()
    columns = {"tokens": ",", "cache": "", "read in s": ".2f", "tokens/s": ",.0f", "ms a token after it": ".1f"}
    columns |= {"MB of cache": ",.1f", "peak MB": ",.0f"}
    shown = []
    found: dict[str, Any] = {}
    total = sum(length * _repeats(length) for length in lengths) * len(ways)
    what = f"{base['name']} reads {', '.join(f'{length:,}' for length in lengths)} tokens in {len(ways)} ways"
    with (
        progress_bar(what, total, console.is_terminal, between=True) as advance,
        autocast(cfg.parallel.precision, device),
    ):
        for way, model in ways.items():
            # The first calls allocate memory of libraries.
            _measure(way, model, min(lengths[0], 256), setting)
        for length in lengths:
            repeated: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(_repeats(length)):
                for way, model in ways.items():
                    repeated[way].append(_measure(way, model, length, setting))
                    advance(length)
            found[str(length)] = {
                way: {key: [one[key] for one in values] for key in values[0]} for way, values in repeated.items()
            }
            for way, measured in found[str(length)].items():
                seconds, milliseconds, held, peak = (statistics.median(values) for values in measured.values())
                cache = "its own" if way == BASE_CACHE else f"memory, segments of {int(way):,}"
                speed = _tokens_read(length) / seconds
                shown.append((length, cache, seconds, speed, milliseconds, held / 2**20, peak / 2**20))
    title = f"reading and continuing a prompt ({base['name']}, weights in {cfg.model['dtype']})"
    print_table(console, title, columns, shown)
    return {
        "base": base,
        "lengths": found,
        "tokens_per_call": TOKENS_PER_CALL,
        "new_tokens": NEW_TOKENS,
        "options": {key: value for key, value in cfg.model.items() if key not in ("name", "base", "memory", "train")},
    }


def _repeats(length: int) -> int:
    return REPEATS if length <= REPEATED_TOKENS else 1


def _tokens_read(length: int) -> int:
    return max(1, length - NEW_TOKENS // 2)


def _ways(setting: Setting) -> dict[str, Any]:
    """Variant -> model in evaluation mode. Variants with a memory share one model; its segment length is changed."""
    cfg, options = setting.cfg, setting.cfg.model
    if base_of(options) is None:
        raise InputError(
            f"suite.prompt_tokens={cfg.suite.prompt_tokens}: model={options['name']} has no cache to compare with; "
            "measure a pretrained language model, model=llm"
        )
    if options["memory"] != "infini":
        raise InputError(
            f"model.memory={options['memory']!r}: suite.prompt_tokens measures the memory beside the base's own cache; "
            "leave it out"
        )
    segments = sorted(set(cfg.suite.prompt_segments), reverse=True)
    dims = replace(cfg.dims, segment_length=segments[0])
    unset = dict.fromkeys(("memory_decay", "input_gate", "layers"))
    stock = {**options, "memory": "full", "window": "segment", "sinks": 0, **unset}
    own, with_memory = (build_model(chosen, dims, 0).to(setting.device).eval() for chosen in (stock, options))
    return {BASE_CACHE: own, **{str(segment): with_memory for segment in segments}}


def _measure(way: str, model: Any, length: int, setting: Setting) -> dict[str, float]:
    """Reads one prompt and continues it. The keys are in the order of the table's columns."""
    device = setting.device
    if way != BASE_CACHE:
        model.resize_segments(int(way))
    generator = torch.Generator().manual_seed(setting.cfg.seed)
    ids = torch.randint(len(model.output_weight), (1, _tokens_read(length)), generator=generator).to(device)
    before = start_peak(device, "suite.prompt_tokens", "[]")
    begin = time.perf_counter()
    state, hidden = None, None
    for part in ids.split(ids.shape[1] if way == BASE_CACHE else TOKENS_PER_CALL, 1):
        hidden, state, _ = model(part, state)
    assert hidden is not None and state is not None
    token = model.head(hidden[:, -1:]).argmax(-1)
    wait(device)
    seconds = time.perf_counter() - begin
    del hidden
    begin = time.perf_counter()
    for _ in range(NEW_TOKENS):
        last, state, _ = model(token, state)
        token = model.head(last).argmax(-1)
        wait(device)
    return {
        "read_seconds": seconds,
        "decode_milliseconds": 1000 * (time.perf_counter() - begin) / NEW_TOKENS,
        "cache_bytes": state_bytes(state),
        "peak_bytes": peak_memory_bytes(device) - before,
    }
