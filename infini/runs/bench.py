"""`infini bench`: the cost of the memory. It compares training steps with `local` (infini/bench/training.py), long with
short streams, and decoding after much and after little text; and it measures long training sequences
and long sources (infini/bench/sources.py), prompts of a pretrained language model (infini/bench/prompts.py), and one
layer against others (infini/bench/layer.py)."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from infini import records
from infini.bench.layer import layer_costs
from infini.bench.prompts import prompt_costs
from infini.bench.sources import source_costs
from infini.bench.training import (
    VOCABULARY,
    Setting,
    agreement,
    matrix_product_rate,
    print_table,
    product_flops,
    quartiles,
    start_peak,
    training_lengths,
    training_steps,
    wait,
)
from infini.config.schema import Config
from infini.nn.state import State, state_bytes
from infini.runs.common import keep_large_buffers, start_record, with_base
from infini.runs.table import wide_console
from infini.system.devices import autocast, peak_memory_bytes, pick_device, reset_peak_memory
from infini.system.progress import progress_bar

STREAM_CALL = 512
"""Approximate number of tokens per call in streaming. The activations of a call count in the peak memory."""


def run(cfg: Config, overrides: list[str]) -> int:
    """Measure, print, and write a record of verb `bench`."""
    keep_large_buffers()
    device = pick_device(cfg.parallel.accelerator)
    cfg = with_base(cfg, overrides)
    record = start_record("bench", cfg, overrides)
    console = wide_console()
    peak, used = matrix_product_rate(cfg.parallel.precision, device)
    console.print(f"matrix products: {peak / 1e12:.3f} TFLOP/s in {used} on this machine", highlight=False)
    record.series["matrix_product_flops"], record.series["matrix_product_format"] = peak, used
    setting = Setting(cfg, overrides, device, console)
    if cfg.suite.oracle_tokens:
        record.series["oracle"] = _oracle_error(cfg, device, console)
    if cfg.suite.repeats:
        for again in (False, True) if cfg.suite.checkpointing else (cfg.recipe.checkpoint_activations,):
            key = "train_checkpointed" if again else "train"
            record.series[key] = training_steps(setting, peak, again)
    if cfg.suite.agreement_tokens:
        record.series["agreement"] = agreement(setting)
    if cfg.suite.stream_tokens:
        record.series["stream"] = _streaming(setting, peak)
    if cfg.suite.decode_tokens:
        record.series["decode"] = _decoding(setting, peak)
    if cfg.suite.source_tokens:
        record.series["sources"] = source_costs(setting)
    if cfg.suite.training_segments:
        record.series["training_lengths"] = training_lengths(setting)
    if cfg.suite.prompt_tokens:
        record.series["prompts"] = prompt_costs(setting)
    if cfg.suite.layer_tokens:
        record.series["layer"] = layer_costs(setting, peak)
    path = records.write_record(record, cfg.results_dir)
    console.print(f"record: {path}", markup=False, soft_wrap=True)
    return 0


def _oracle_error(cfg: Config, device: torch.device, console: Console) -> dict[str, dict[str, float]]:
    """||layer - oracle|| / ||oracle|| of output and memory for one layer of these dims on this device."""
    from infini.nn.attention import InfiniAttention
    from infini.nn.ops import reference
    from infini.nn.state import leaves

    dims, tokens = cfg.dims, cfg.suite.oracle_tokens
    errors: dict[str, dict[str, float]] = {}
    for rule in ("linear", "delta"):
        torch.manual_seed(cfg.seed)
        layer = InfiniAttention(
            dims.d_model,
            dims.n_heads,
            dims.d_key,
            dims.segment_length,
            rule,
            d_value=dims.d_value,
            n_kv_heads=dims.n_kv_heads,
            gate_init="normal",
        )
        x = torch.randn(1, tokens, dims.d_model)
        with torch.no_grad():
            wide = copy.deepcopy(layer).double()
            q, k, v = (
                proj(x.double()).unflatten(-1, (heads, -1))
                for proj, heads in (
                    (wide.q_proj, layer.n_heads),
                    (wide.k_proj, layer.n_kv_heads),
                    (wide.v_proj, layer.n_kv_heads),
                )
            )
            a, m, z = reference.infini_attention(
                q, k, v, wide.beta, segment_length=dims.segment_length, update_rule=rule
            )
            expected = {"output": wide.o_proj(a.flatten(2)), "memory": m, "normaliser": z}
            with autocast(cfg.parallel.precision, device):
                y, state = layer.to(device)(x.to(device))
        found = {path.rsplit(".", 1)[-1]: leaf for path, leaf in leaves(state) if ".memory." in path}
        got = {"output": y, "memory": found["m_BGKV"], "normaliser": found["z_BGK"]}
        errors[rule] = {
            name: float((got[name].double().cpu() - right).norm() / right.norm()) for name, right in expected.items()
        }
        shown = ", ".join(f"{name} {error:.1e}" for name, error in errors[rule].items())
        console.print(f"{rule}, one layer against the float64 oracle on {tokens:,} tokens: {shown}", highlight=False)
    return errors


def _local_first(cfg: Config) -> list[str]:
    """The models to measure; the first is the reference of the comparison."""
    return sorted(cfg.suite.models, key=lambda name: name != "local")


def _streaming(setting: Setting, peak: float) -> dict[str, Any]:
    """Streaming of a short and a long text in one row: tokens/s, peak memory above the model, bytes of the state.

    The long text is read in parts as long as the short one, and the short one before each part. The ratio is the median
    over these pairs, so that drift and interruptions of the machine do not decide it. peak: operations per second of a
    matrix product.
    """
    cfg, device, console = setting.cfg, setting.device, setting.console
    N = cfg.dims.segment_length
    call = max(1, STREAM_CALL // N) * N
    short, long = cfg.suite.stream_short_tokens, cfg.suite.stream_tokens
    columns = {"model": "", "tokens": ",", "tokens/s": ",.0f", "of peak": ".1%", "ratio": ".3f", "quartiles": ""}
    columns |= {"to local": ".3f", "peak above model (MB)": ".1f", "state bytes": ","}
    rows: dict[str, dict[str, Any]] = {}
    shown: list[tuple[Any, ...]] = []
    for name in _local_first(cfg):
        what = f"streaming {long:,} tokens through {name}, and {short:,} between its parts"
        model = setting.language_model(name).eval()
        # The first call is not measured: libraries and the progress bar allocate memory in it.
        generator = torch.Generator().manual_seed(cfg.seed)
        _stream(cfg, model, call, call, None, generator, device)
        rates: dict[int, list[float]] = {short: [], long: []}
        peaks: dict[int, list[int]] = {short: [], long: []}
        bytes_of: dict[int, int] = {}
        states: dict[int, State] = {}
        with progress_bar(what, long // short, console.is_terminal, between=True) as advance:
            base = start_peak(device, "suite.stream_tokens", "0")
            for _ in range(long // short):
                for length in (short, long):
                    # Every short text starts from an empty state, which is freed before the long text continues.
                    states.pop(short, None)
                    reset_peak_memory(device)
                    rate, states[length] = _stream(cfg, model, call, short, states.get(length), generator, device)
                    rates[length].append(rate)
                    peaks[length].append(peak_memory_bytes(device) - base)
                    bytes_of[length] = state_bytes(states[length])
                advance(1)
        low, ratio, high = quartiles([b / a for a, b in zip(rates[short], rates[long], strict=True)])
        flops = product_flops(model, head=False)
        shares = {n: flops * statistics.median(rates[n]) / peak for n in rates}
        local_rates = rows["local"]["tokens_per_second"][long] if rows else rates[long]
        rows[name] = {
            "tokens_per_second": rates,
            "share_of_peak": shares,
            "ratio": [low, ratio, high],
            "rate_to_local": statistics.median(rates[long]) / statistics.median(local_rates),
            "peak_growth_bytes": peaks,
            "state_bytes": bytes_of,
        }
        # All short texts but the first run while the long text's state is in memory.
        for length, used in ((short, peaks[short][0]), (long, max(peaks[long]))):
            pair = (ratio, f"{low:.3f}-{high:.3f}", rows[name]["rate_to_local"]) if length == long else (None,) * 3
            rate = statistics.median(rates[length])
            shown.append((name, length, rate, shares[length], *pair, used / 2**20, bytes_of[length]))
    print_table(console, "", columns, shown)
    return {"models": rows, "short": short, "long": long, "tokens_per_call": call}


@torch.inference_mode()
def _stream(
    cfg: Config,
    model: Any,
    call: int,
    n_tokens: int,
    state: State | None,
    generator: torch.Generator,
    device: torch.device,
    advance: Callable[[float], None] = lambda tokens: None,
) -> tuple[float, State]:
    """Tokens per second for `n_tokens` random tokens after `state`, and the state after them."""
    begin = time.perf_counter()
    with autocast(cfg.parallel.precision, device):
        for position in range(0, n_tokens, call):
            width = min(call, n_tokens - position)
            ids = torch.randint(VOCABULARY, (1, width), generator=generator).to(device)
            state = model(ids, state).state
            advance(width)
    wait(device)
    assert state is not None
    return n_tokens / (time.perf_counter() - begin), state


def _decoding(setting: Setting, peak: float) -> dict[str, Any]:
    """Milliseconds per token of decoding after a short text and after a long one.

    Both texts end at the same slot of a segment, and their tokens are read alternately. The ratio is the median over
    these pairs. peak: see _streaming.
    """
    cfg, device, console = setting.cfg, setting.device, setting.console
    suite = cfg.suite
    generator = torch.Generator().manual_seed(cfg.seed)
    columns = {"model": "", "tokens before": ",", "median ms a token": ".3f", "quartiles": "", "of peak": ".2%"}
    columns |= {"ratio": ".3f", "quartiles of ratio": "", "to local": ".3f"}
    rows: dict[str, dict[str, Any]] = {}
    shown: list[tuple[Any, ...]] = []
    for name in _local_first(cfg):
        model = setting.language_model(name).eval()
        # A window of `full` has several segments.
        N = model.segment_length
        call = max(1, STREAM_CALL // N) * N
        lengths = [-(-length // N) * N for length in (suite.decode_short_tokens, suite.decode_long_tokens)]
        what = f"{suite.decode_tokens} tokens one by one through {name}, after {lengths[0]:,} and {lengths[1]:,} tokens"
        with progress_bar(what, sum(lengths), console.is_terminal, between=True) as advance:
            states = [_stream(cfg, model, call, length, None, generator, device, advance)[1] for length in lengths]
        seconds: list[list[float]] = [[], []]
        for step in range(suite.decode_tokens + 3):
            for which, state in enumerate(states):
                rate, states[which] = _stream(cfg, model, 1, 1, state, generator, device)
                if step >= 3:  # the first warm up
                    seconds[which].append(1.0 / rate)
        ratios = quartiles([long / short for short, long in zip(*seconds, strict=True)])
        milliseconds = [[1000 * value for value in quartiles(found)] for found in seconds]
        shares = [product_flops(model, head=False) / quartiles(found)[1] / peak for found in seconds]
        local = rows["local"]["milliseconds"] if rows else milliseconds
        rows[name] = {
            "tokens_before": lengths,
            "milliseconds": milliseconds,
            "share_of_peak": shares,
            "ratio": list(ratios),
            "milliseconds_to_local": milliseconds[1][1] / local[1][1],
        }
        for length, (low, median, high), share in zip(lengths, milliseconds, shares, strict=True):
            of_pair = (ratios[1], f"{ratios[0]:.3f}-{ratios[2]:.3f}", rows[name]["milliseconds_to_local"])
            pair = of_pair if length == lengths[1] else (None,) * 3
            shown.append((name, length, median, f"{low:.3f}-{high:.3f}", share, *pair))
    print_table(console, "", columns, shown)
    return {"models": rows, "tokens": suite.decode_tokens}
