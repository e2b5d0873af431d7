"""`infini bench suite=layer`: one layer against others, its tables and figure."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from command_runner import Runner
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from infini import records
from infini.bench import layer
from infini.bench.training import Setting
from infini.config.compose import compose
from infini.runs import bench, figure

pytestmark = pytest.mark.usefixtures("elsewhere", "clock")

SIZES = ["dims.d_model=16", "dims.n_heads=2", "dims.d_key=8", "dims.d_value=8", "dims.segment_length=8"]
WAYS = {"local", "linear", "delta", "full"}


def setting_of(*words: str) -> Setting:
    cfg = compose(["suite=layer", *SIZES, "parallel.precision=fp32", *words])
    return Setting(cfg, list(words), torch.device("cpu"), Console(quiet=True))


@pytest.fixture
def measured(infini: Runner, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(bench, "matrix_product_rate", lambda precision, device: (1e12, "float32"))
    monkeypatch.setattr(layer, "measure_rates", lambda flops, device: layer.Rates(flops, 1e9, 1e10))
    others = [text for text in infini.settings if not text.startswith(("dims.", "parallel."))]
    infini.settings = [*others, *SIZES, "parallel.precision=fp32"]
    lengths = ["suite.layer_tokens=[32,16]", "suite.layer_backward_tokens=16", "suite.layer_full_tokens=16"]
    infini("bench", "suite=layer", *lengths)
    return infini


def test_what_is_measured(measured: Runner) -> None:
    (run,) = measured.records()
    found = run.series["layer"]
    assert {name: set(passes) for name, passes in found["lengths"].items()} == {
        "16": {"forward", "backward"},
        "32": {"forward"},
    }
    assert set(found["lengths"]["16"]["backward"]) >= WAYS
    assert set(found["lengths"]["32"]["forward"]) & WAYS == WAYS - {"full"}
    for passes in found["lengths"].values():
        for ways in passes.values():
            assert ways["local"]["to_local"] == 1.0
            assert all(len(one["seconds"]) == layer.ROUNDS and min(one["seconds"]) > 0 for one in ways.values())


def test_tables_and_figure(measured: Runner) -> None:
    out = measured("table", "report=layer", "full=true")
    for text in ("Infini-attention, Linear + Delta", "backward", "Least time", "segments of 8"):
        assert text in out
    cfg = compose([f"results_dir={measured.results}"])
    from_which, *paths = figure._draw_bench("layer", cfg, [measured.results])
    png, svg = map(Path, paths)
    assert from_which.startswith(f"bench suite=layer: drawn from the runs in {measured.results} alone")
    assert (png.name, svg.name) == ("layer_laptop.png", "layer_laptop.svg")
    (run,) = measured.records()
    run.environment.update(git_dirty=False, git_revision="0" * 40)
    records.write_record(run, measured.results)
    names = [Path(line).name for line in measured("publish", "report=layer").splitlines()]
    assert names == [f"{run.run_id}.json", *(f"layer_laptop.{kind}" for kind in ("md", "tex", "csv", "png"))]


def test_without_a_measurement_it_says_how_to_make_one(infini: Runner) -> None:
    infini.results.mkdir()
    assert "no measurement yet: infini bench suite=layer" in infini("table", "report=layer")


class Operators(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_rate_is_that_of_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else that is timed would make the least time too long, and the share of it too high."""
    monkeypatch.setattr(layer, "UNCACHED_NUMEL", 2**10)
    with Operators() as operators:
        rates = layer.measure_rates(1e12, torch.device("cpu"))
    assert min(rates.exponentials, rates.bytes) > 0
    made = {"randn", "empty_like"}
    assert {name: count for name, count in operators.calls.items() if name not in made} == {"exp": 11, "copy_": 11}


@pytest.mark.parametrize(
    ("way", "backward", "by_hand"),
    [
        # 32 tokens, 2 heads of 8, d_model 16, segments of 8: 32 x 4.5 = 144 pairs of query and key; projections
        # 4 x 2 x 32 x 16 x 16 = 65,536; attention 2 x 2 x 144 x 16 = 9,216; one exponential a pair and head;
        # 32 x (2 x 16 + 4 x 16) numbers, written and read.
        ("local", False, (65_536 + 9_216, 288, 2 * 3_072 * 4)),
        ("local", True, (3 * 65_536 + 3.5 * 9_216, 2 * 288, 3 * 2 * 3_072 * 4)),
        # 32 x 16.5 = 528 pairs.
        ("full", False, (65_536 + 4 * 528 * 16, 1_056, 2 * 3_072 * 4)),
        # sigma(Q) M and sigma(K)^T V: 2 x 2 x 32 x 16 x 8; sigma of 2 x 32 x 16 numbers; 3 x 32 x 16 more numbers.
        ("linear", False, (65_536 + 9_216 + 16_384, 288 + 1_024, 2 * 4_608 * 4)),
        # sigma(K) M as well.
        ("delta", True, (3 * (65_536 + 24_576) + 3.5 * 9_216, 288 + 1_024 + 288, 3 * 2 * 4_608 * 4)),
        ("peer_delta", True, (3 * (65_536 + 24_576) + 3.5 * 9_216, 288 + 1_024 + 288, 3 * 2 * 4_608 * 4)),
    ],
)
def test_the_least_work_is_that_counted_by_hand(way: str, backward: bool, by_hand: tuple[float, float, float]) -> None:
    """The shares of the least time on the table rest on it."""
    found = layer.work_of(way, setting_of().cfg.dims, 32, backward, 4)
    assert (found.flops, found.exponentials, found.bytes) == by_hand
    rates = layer.Rates(product_flops=2.0, exponentials=4.0, bytes=8.0)
    assert found.least_seconds(rates) == by_hand[0] / 2 + by_hand[1] / 4 + by_hand[2] / 8


@pytest.mark.parametrize("way", ["linear", "delta"])
def test_the_least_work_has_the_products_of_the_layer(way: str) -> None:
    """Counted by torch in the forward pass, without attention: the products of whole segments are not causal."""
    setting = setting_of()
    x = torch.randn(1, 32, 16)
    counted = {}
    for name in ("local", way):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            layer._ways(setting)[name](x)
        counted[name] = counter.get_total_flops()
    least = {name: layer.work_of(name, setting.cfg.dims, 32, False, 4).flops for name in ("local", way)}
    # The denominators, 2 K for each token and head, and Delta's second, are products as well.
    extra = counted[way] - counted["local"] - (least[way] - least["local"])
    assert 0 <= extra <= 0.5 * (least[way] - least["local"])


@pytest.mark.parametrize("way", sorted(layer.PEERS))
def test_the_other_package_computes_the_same(way: str) -> None:
    """Values and gradients in the inputs, over four segments, with the weights of our layer."""
    pytest.importorskip(layer.PEER_PACKAGE)
    ways = layer._ways(setting_of("seed=3"))
    x = torch.randn(1, 32, 16, requires_grad=True)
    found = []
    for name in (layer.PEERS[way], way):
        y = ways[name](x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        found.append((y, grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(cast(torch.Tensor, theirs), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("suite.layer_tokens=[0]", "suite.layer_tokens=[0]: must be whole numbers of at least 1"),
        ("suite.layer_tokens=[]", "suite.repeats=0: must be above 0: nothing else is measured"),
        ("suite.layer_full_tokens=-1", "suite.layer_full_tokens=-1: must be at least 0"),
        # Sizes that the layers would not have.
        ("dims.n_kv_heads=1", "dims.n_kv_heads=1: must be null or 2: other layers are not measured"),
        ("dims.d_value=4", "dims.d_value=4: must be null or 8: other layers are not measured"),
    ],
)
def test_one_line_for_a_mistake(infini: Runner, words: str, said: str) -> None:
    assert infini.error("bench", "suite=layer", words).startswith(said)
