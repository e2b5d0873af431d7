"""One attention layer at the paper's sizes: Infini-attention against local and full attention, and against the package
infini-transformer-pytorch, with equal weights.

Every time is compared with the least that the same work takes at rates measured in the same run; see least_seconds.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F

from infini.bench.training import Setting, print_table, quartiles, seconds_of
from infini.config.schema import DimsConfig
from infini.nn.attention import InfiniAttention, LocalAttention
from infini.system.devices import autocast, uses_bfloat16
from infini.system.progress import progress_bar

ROUNDS, MANY_TOKENS = 5, 32768
"""Measurements of each variant; three where a sequence is longer than MANY_TOKENS."""
OURS = ("linear", "delta")
PEERS = {"peer_linear": "linear", "peer_delta": "delta"}
"""Variant of the other package -> our update rule with its equations."""
UNCACHED_NUMEL = 2**26
"""Numbers of a tensor that does not fit the caches."""
PEER_PACKAGE = "infini_transformer_pytorch"


@dataclass(frozen=True)
class Rates:
    """Work that this device does in a second, each kind measured alone."""

    product_flops: float
    """Operations of a large matrix product, in the dtype of the products."""
    exponentials: float
    """Exponentials of float32 numbers."""
    bytes: float
    """Bytes read and written by a copy that does not fit the caches."""


@dataclass(frozen=True)
class Work:
    """The least work of one call of a layer."""

    flops: float
    exponentials: float
    bytes: float

    def least_seconds(self, rates: Rates) -> float:
        """The sum of the three times: products, exponentials and memory traffic that do not overlap."""
        return self.flops / rates.product_flops + self.exponentials / rates.exponentials + self.bytes / rates.bytes


def work_of(way: str, dims: DimsConfig, tokens: int, backward: bool, itemsize: int) -> Work:
    """The least work of a layer on one sequence, without what an implementation adds.

    Products: projections, causal scores and their sums of values, and for a memory its reads and updates. A backward
    pass has twice the products of the forward pass; those of attention five for its two, because scores are made
    again. Exponentials: one for each score, recomputed in the backward pass, and one for each number of sigma(q) and
    sigma(k). Memory traffic: input, queries, keys, values, attention and output once written and once read, and as
    many reads of the memory, sigma(q) and sigma(k).

    way: local, full, linear, delta or one of PEERS. itemsize: bytes of a number between the operations.
    """
    width, K, T = dims.n_heads * dims.d_key, dims.d_key, float(tokens)
    seen = T if way == "full" else min(T, dims.segment_length)
    pairs = T * (seen + 1) / 2
    products = 8 * T * dims.d_model * width
    attention = 4 * pairs * width
    exponentials, numbers = pairs * dims.n_heads, T * (2 * dims.d_model + 4 * width)
    rule = PEERS.get(way, way)
    if rule in OURS:
        products += {"linear": 4, "delta": 6}[rule] * T * width * K
        exponentials += 2 * T * width
        numbers += 3 * T * width
    bytes_moved = 2 * numbers * itemsize
    if not backward:
        return Work(products + attention, exponentials, bytes_moved)
    return Work(3 * products + 3.5 * attention, exponentials + pairs * dims.n_heads, 3 * bytes_moved)


def measure_rates(product_flops: float, device: torch.device) -> Rates:
    """The rates of this device, medians of nine. product_flops: see infini.bench.training.matrix_product_rate."""

    def per_second(amount: int, run: Callable[[], Any]) -> float:
        return amount / statistics.median([seconds_of(run, device) for _ in range(11)][2:])

    few = torch.randn(2**25 if device.type == "cuda" else 2**16, device=device)
    many = torch.randn(UNCACHED_NUMEL, device=device)
    exponentials, to = torch.empty_like(few), torch.empty_like(many)
    return Rates(
        product_flops,
        per_second(few.numel(), lambda: torch.exp(few, out=exponentials)),
        per_second(8 * many.numel(), lambda: to.copy_(many)),
    )


def layer_costs(setting: Setting, product_flops: float) -> dict[str, Any]:
    """Seconds of one layer on one sequence of every length of `suite.layer_tokens`, forward, and up to
    `suite.layer_backward_tokens` forward and backward too. Full attention reads up to `suite.layer_full_tokens`.

    In every round each variant is measured once. The peer is measured if its package is installed (the extra `peers`).
    The relative difference of its outputs to ours with equal weights is recorded.
    """
    cfg, device, console = setting.cfg, setting.device, setting.console
    rates = measure_rates(product_flops, device)
    ways = _ways(setting)
    with torch.no_grad():
        differences = _differences(ways, setting)
    for way, found in differences.items():
        console.print(f"{way}: differs from {PEERS[way]} by {found:.1e} (relative, float32, equal weights)")
    if not differences:
        console.print(f"{PEER_PACKAGE}: not installed, left out; pip install infini-transformer-pytorch")
    lengths, backward_up_to = sorted(set(cfg.suite.layer_tokens)), cfg.suite.layer_backward_tokens
    passes = [(n, again) for n in lengths for again in (False, True) if not again or n <= backward_up_to]
    itemsize = 2 if uses_bfloat16(cfg.parallel.precision, device) else 4
    columns = {"tokens": ",", "pass": "", "way": "", "median s": ".3f", "quartiles": "", "to local": ".3f"}
    shown = []
    found_at: dict[str, dict[str, Any]] = {}
    work = sum((_rounds(n) + 1) * n for n, _ in passes) * len(ways)
    with progress_bar("one layer", work, console.is_terminal, between=True) as advance:
        for tokens, again in passes:
            chosen = {way: read for way, read in ways.items() if way != "full" or tokens <= cfg.suite.layer_full_tokens}
            seconds: dict[str, list[float]] = {way: [] for way in chosen}
            for round_ in range(_rounds(tokens) + 1):
                for way, read in chosen.items():
                    found = _seconds(read, tokens, again, setting)
                    # The first round warms up.
                    if round_:
                        seconds[way].append(found)
                    advance(tokens)
            name = "backward" if again else "forward"
            for way, values in seconds.items():
                least = work_of(way, cfg.dims, tokens, again, itemsize).least_seconds(rates)
                low, median, high = quartiles(values)
                to_local = statistics.median(ours / local for ours, local in zip(values, seconds["local"], strict=True))
                record = {"seconds": values, "to_local": to_local, "least_seconds": least}
                found_at.setdefault(str(tokens), {}).setdefault(name, {})[way] = record
                which = "forward and backward" if again else "forward"
                shown.append((tokens, which, way, median, f"{low:.3f}-{high:.3f}", to_local, least / median))
    title = f"one attention layer, {cfg.dims.n_heads} heads of {cfg.dims.d_key}, one sequence"
    print_table(console, title, columns | {"of the least time": ".0%"}, shown)
    return {
        "lengths": found_at,
        "rates": asdict(rates),
        "peer_differences": differences,
        **{key: getattr(cfg.dims, key) for key in ("segment_length", "n_heads", "d_key", "d_model")},
    }


def _rounds(tokens: int) -> int:
    return ROUNDS if tokens <= MANY_TOKENS else 3


Read = Callable[[torch.Tensor], torch.Tensor]


def _ways(setting: Setting) -> dict[str, Read]:
    """Way -> a function from inputs [1, T, D] to outputs. All have the same weights; inputs are normalised first, as
    the peer's layer does by itself."""
    dims, device = setting.cfg.dims, setting.device
    sizes = (dims.d_model, dims.n_heads, dims.d_key)
    torch.manual_seed(setting.cfg.seed)
    layers: dict[str, LocalAttention] = {
        "local": LocalAttention(*sizes, dims.segment_length),
        "linear": InfiniAttention(*sizes, dims.segment_length, "linear", gate_init="normal"),
        "delta": InfiniAttention(*sizes, dims.segment_length, "delta", gate_init="normal"),
        "full": LocalAttention(*sizes, 1),
    }
    for layer in layers.values():
        layer.load_state_dict(layers["linear"].state_dict(), strict=isinstance(layer, InfiniAttention))
        layer.to(device)

    def reader(layer: LocalAttention, whole: bool) -> Read:
        def read(x: torch.Tensor) -> torch.Tensor:
            if whole:
                layer.segment_length = x.shape[1]
            return layer(F.rms_norm(x, x.shape[-1:]))[0]

        return read

    ways = {name: reader(layer, name == "full") for name, layer in layers.items()}
    try:
        package = importlib.import_module(f"{PEER_PACKAGE}.infini_transformer")
    except ModuleNotFoundError:
        return ways
    for way, rule in PEERS.items():
        source = layers[rule]
        assert isinstance(source, InfiniAttention)
        ways[way] = _peer(package, source, rule)
    return ways


def _peer(package: Any, ours: InfiniAttention, rule: str) -> Read:
    """The peer's layer with the weights of ours: its gates weight attention, where ours weight the memory, and its
    rotary pairs are neighbours, where ours are halves apart."""
    H, K, D = ours.n_heads, ours.d_key, ours.d_model
    peer = package.CausalAttention(D, dim_head=K, heads=H, use_mem_delta_rule=rule == "delta")
    # Column 2i of a head takes our i, column 2i + 1 our i + K / 2.
    order = torch.arange(K).unflatten(0, (2, K // 2)).t().flatten()

    def reordered(weight: torch.Tensor) -> torch.Tensor:
        return weight.unflatten(0, (H, K))[:, order].flatten(0, 1)

    with torch.no_grad():
        q, k, v = ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight
        peer.to(q.device).to_qkv.weight.copy_(torch.cat([reordered(q), reordered(k), v]))
        peer.to_out.weight.copy_(ours.o_proj.weight)
        peer.fastweight_mem.head_gates.copy_(-ours.beta)

    def read(x: torch.Tensor) -> torch.Tensor:
        outputs, memories = [], None
        for segment in x.split(ours.segment_length, 1):
            y, _, memories = peer(segment, past_memories=memories, return_new_memories=True)
            outputs.append(y)
        return torch.cat(outputs, 1)

    return read


def _differences(ways: dict[str, Read], setting: Setting) -> dict[str, float]:
    """Way of the peer -> ||peer - ours|| / ||ours|| in float32, over three segments."""
    x = torch.randn(1, 3 * setting.cfg.dims.segment_length, setting.cfg.dims.d_model).to(setting.device)
    found = {}
    for way, rule in PEERS.items():
        if way in ways:
            ours = ways[rule](x)
            found[way] = float((ways[way](x) - ours).norm() / ours.norm())
    return found


def _seconds(read: Read, tokens: int, backward: bool, setting: Setting) -> float:
    """Seconds of one call; with a backward pass, to the input and all weights."""
    cfg, device = setting.cfg, setting.device
    x = torch.randn(1, tokens, cfg.dims.d_model, device=device, requires_grad=backward)

    def call() -> torch.Tensor:
        with torch.set_grad_enabled(backward), autocast(cfg.parallel.precision, device):
            y = read(x)
        if backward:
            y.float().sum().backward()
        return y

    return seconds_of(call, device)
