"""Cost of a training step: seconds relative to `local`, tokens per second, parameters, state size and peak memory; and
memory of training on longer sequences, with all activations kept, or those of one group of segments at a time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from infini.config.compose import compose
from infini.config.schema import Config
from infini.errors import InputError
from infini.models import build_model, kind_of
from infini.nn.ops.cross_entropy import summed_cross_entropy
from infini.nn.protocols import ModelOutput
from infini.system.devices import autocast, peak_memory_bytes, reset_peak_memory, uses_bfloat16
from infini.system.progress import progress_bar
from infini.training.activation_checkpointing import grouped

VOCABULARY = 4096


@dataclass(frozen=True)
class Setting:
    """The configuration, the device and the console of a benchmark."""

    cfg: Config
    overrides: list[str]
    device: torch.device
    console: Console

    def build(self, name: str, settings: Sequence[str] = ()) -> Any:
        """Build a model by name with its default options and these settings, at the configured sizes and seed."""
        others = [text for text in self.overrides if not text.startswith("model=")]
        options = compose([*others, f"model={name}", *settings]).model
        torch.manual_seed(self.cfg.seed)
        return build_model(options, self.cfg.dims, VOCABULARY).to(self.device)

    def language_model(self, name: str) -> Any:
        """Build a model of suite.models. Raises InputError if it is not a language model."""
        if kind_of(name) == "seq2seq":
            raise InputError(f"suite.models: {name} is an encoder-decoder; this suite takes language models")
        return self.build(name)


def training_steps(setting: Setting, peak: float, again: bool) -> dict[str, Any]:
    """Interleaved repeats of one training step (forward, loss, backward) for each model, in one process.

    peak: operations per second of a matrix product. again: whether activations are computed again.
    """
    cfg, device, console = setting.cfg, setting.device, setting.console
    segments = cfg.recipe.segments_per_sequence
    tokens = segments * cfg.dims.segment_length
    ids = torch.randint(VOCABULARY, (cfg.recipe.batch_size, tokens), device=device)
    models = {name: setting.language_model(name) for name in cfg.suite.models}
    for model in models.values():
        model.checkpoint_activations = again
        # A base is loaded in evaluation mode, in which it never computes activations again.
        model.train()
    seconds: dict[str, list[float]] = {name: [] for name in models}
    memory: dict[str, int | None] = {}
    rounds = cfg.suite.repeats + 2
    what = f"{rounds} training steps of each of {', '.join(models)}"
    with progress_bar(what, rounds * len(models), console.is_terminal, between=True) as advance:
        for repeat in range(rounds):
            for name, model in models.items():
                # The first repeat warms up. Peak memory is measured in the last one: resetting the peak takes time.
                base = None
                if repeat == rounds - 1:
                    with suppress(OSError):
                        base = reset_peak_memory(device)
                begin = time.perf_counter()
                training_step(setting, model, model, ids)
                if 0 < repeat < rounds - 1:
                    seconds[name].append(time.perf_counter() - begin)
                memory[name] = None if base is None else peak_memory_bytes(device) - base
                advance(1)
    title = f"training step, {ids.shape[0]} x {tokens:,} tokens{', activations computed again' if again else ''}"
    columns = {"model": "", f"parameters, vocabulary {VOCABULARY:,}": ",", "median s": ".3f", "s / local": ".3f"}
    columns |= {"quartiles": "", "tokens/s": ",.0f", "of peak": ".0%", "floats in memory": ","}
    columns |= {"peak above models (MB)": ",.0f"}
    rows, shown = {}, []
    for name, model in models.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds["local"], strict=True)]
        low, median, high = quartiles(seconds[name])
        ratio_low, ratio, ratio_high = quartiles(ratios)
        parameters, bytes_used = sum(p.numel() for p in model.parameters()), memory[name]
        speed, floats = ids.numel() / median, model.state_floats(segments)
        # The backward pass has twice as many products as the forward pass.
        share = 3 * product_flops(model, head=True) * ids.numel() / median / peak
        rows[name] = {
            "parameters": parameters,
            "seconds": [low, median, high],
            "ratio_to_local": [ratio_low, ratio, ratio_high],
            "tokens_per_second": speed,
            "share_of_peak": share,
            "state_floats": floats,
            "peak_memory_bytes": bytes_used,
        }
        peak_mb, middle = None if bytes_used is None else bytes_used / 2**20, f"{ratio_low:.3f}-{ratio_high:.3f}"
        shown.append((name, parameters, median, ratio, middle, speed, share, floats, peak_mb))
    print_table(console, title, columns, shown)
    return {
        "models": rows,
        "batch_size": ids.shape[0],
        "tokens": tokens,
        "segment_length": cfg.dims.segment_length,
        "repeats": cfg.suite.repeats,
    }


def training_lengths(setting: Setting) -> dict[str, Any]:
    """Seconds and peak memory, in bytes above the use before, of one training step (forward, loss, backward).

    Measured for every model and every length of `suite.training_segments`, with all activations kept ("all") and with
    those of `suite.training_group` segments at a time ("grouped"), on random tokens and the recipe's batch size.

    Raises InputError if peak memory cannot be reset, as on a CPU outside Linux.
    """
    cfg, device, console = setting.cfg, setting.device, setting.console
    N, group = cfg.dims.segment_length, cfg.suite.training_group
    lengths = sorted(cfg.suite.training_segments)
    ways = ("all", "grouped")
    batch = cfg.recipe.batch_size
    columns = {"model": "", "segments": ",", "tokens": ",", "activations kept": "", "seconds": ".2f"}
    columns |= {"peak above model (MB)": ",.0f"}
    rows: dict[str, Any] = {}
    shown = []
    total = 2 * sum(1 + length for length in lengths) * len(cfg.suite.models)
    with progress_bar("training steps", total, console.is_terminal) as advance:
        for name in cfg.suite.models:
            model = setting.language_model(name)
            found: dict[str, Any] = {way: {} for way in ways}
            for length in lengths:
                ids = torch.randint(VOCABULARY, (batch, length * N), device=device)
                for way in ways:
                    read = model if way == "all" else grouped(model, group * N)
                    # The first call allocates memory of compilers and libraries.
                    training_step(setting, model, read, ids[:, :N])
                    base = start_peak(device, "suite.training_segments", "[]")
                    begin = time.perf_counter()
                    training_step(setting, model, read, ids)
                    seconds, peak = time.perf_counter() - begin, peak_memory_bytes(device) - base
                    found[way][str(length)] = {"seconds": seconds, "peak_bytes": peak}
                    kept = "all" if way == "all" else f"of {group} segments"
                    shown.append((name, length, length * N, kept, seconds, peak / 2**20))
                    advance(1 + length)
            rows[name] = found
    title = f"training step, {batch} sequences, segments of {N}; groups of {group} segments"
    print_table(console, title, columns, shown)
    return {"models": rows, "segment_length": N, "batch_size": batch, "group": group}


def product_flops(model: Any, head: bool) -> int:
    """Operations per token in products with weight matrices, two for every weight. head: whether to count the output
    layer.

    Attention, the memory, and vectors that a model reads in addition to the text are not counted.
    """
    tables = (model.embedding.weight, model.output_weight)
    layers = sum(p.numel() for p in model.parameters() if p.dim() == 2 and not any(p is table for table in tables))
    return 2 * (layers + head * model.output_weight.numel())


def training_step(setting: Setting, model: Any, read: Callable[..., ModelOutput], ids: torch.Tensor) -> None:
    """Forward, loss and backward; gradients are discarded. read: the model, or a function that calls it by groups."""
    cfg = setting.cfg
    # Targets are counted on the host; in a training they are there.
    targets = ids.cpu()
    with autocast(cfg.parallel.precision, setting.device):
        out = read(ids, None)
        total, count = summed_cross_entropy(out.hidden_BTD, model.output_weight, targets, cfg.recipe.loss_chunk)
        loss = total / count + out.aux_loss
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    wait(setting.device)


def wait(device: torch.device) -> None:
    """Return when the work of all calls is done: on a GPU a call returns before."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call until its work is done, without the time to free its result."""
    wait(device)
    begin = time.perf_counter()
    result = call()
    wait(device)
    seconds = time.perf_counter() - begin
    del result
    return seconds


def start_peak(device: torch.device, key: str, off: str) -> int:
    """Reset the peak and return the memory in use. Raises InputError if it cannot be reset, as on a CPU outside Linux.

    key: the setting that asks for the measurement. off: the value that does not.
    """
    try:
        return reset_peak_memory(device)
    except OSError as error:
        raise InputError(f"{key}: the peak memory counter cannot be reset here ({error}); set it to {off}") from error


@torch.no_grad()
def agreement(setting: Setting) -> dict[str, float]:
    """||h - r|| / ||r|| for every model's final hidden states: h on this device, r on the CPU in float32."""
    cfg, device, console = setting.cfg, setting.device, setting.console
    ids = torch.randint(VOCABULARY, (1, cfg.suite.agreement_tokens))
    errors = {}
    for name in cfg.suite.models:
        model = setting.language_model(name).eval()
        with autocast(cfg.parallel.precision, device):
            found = model(ids.to(device)).hidden_BTD.double().cpu()
        expected = model.cpu()(ids).hidden_BTD.double()
        errors[name] = float((found - expected).norm() / expected.norm())
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    console.print(f"{device.type} against the CPU on {ids.numel():,} tokens: {shown}", highlight=False)
    return errors


def matrix_product_rate(precision: str, device: torch.device) -> tuple[float, str]:
    """Operations per second of a large matrix product, the median of ten, and its dtype, that of the models."""
    size = 8192 if device.type == "cuda" else 2048
    dtype = torch.bfloat16 if uses_bfloat16(precision, device) else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = [seconds_of(lambda: a @ b, device) for _ in range(13)]
    gc.collect()
    return 2 * size**3 / statistics.median(seconds[3:]), str(dtype).removeprefix("torch.")


def print_table(console: Console, title: str, columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows of texts, numbers and None. columns: heading -> the format of its numbers; "" for texts."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name, no_wrap=True)
    for row in rows:
        pairs = zip(row, columns.values(), strict=True)
        table.add_row(*("" if value is None else value if not form else format(value, form) for value, form in pairs))
    console.print(table)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; a single value is all three."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
