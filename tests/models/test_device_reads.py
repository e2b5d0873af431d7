"""No language model reads a value back from its device: such a read stops a GPU until its queue is empty."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_reads import Calls, counted, counted_id, decoding_calls, training_batch, training_steps
from helpers import SEGMENT, VOCABULARY, assert_on, make_model, marks, mixed, one_in, random_ids

from infini.config.compose import compose
from infini.evaluation import decoding
from infini.evaluation.decoding import Reader
from infini.models import registered
from infini.nn.attention import InfiniAttention
from infini.training.module import LanguageModelModule

MIXED = [mixed("local", "delta", "xl"), mixed("infini_xl", "memorizing", "dai2019")]
FURTHER = [
    {"name": "autocompressor", "bptt_depth": 0},
    {"name": "autocompressor", "bptt_depth": None},
    {"name": "autocompressor", "random_segments": True},
    {"name": "rmt", "bptt_depth": 1},
]
"""Options that decide in which order segments are read."""
MODELS = counted()
_FIRST = {each["name"]: each for each in reversed(MODELS)}


def _usual(options: dict[str, Any]) -> bool:
    """The first variant of each model; and a pretrained model's layers without a memory."""
    return options is _FIRST[options["name"]] or options.get("memory") == "full" or bool(options.get("layers"))


each_model = pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(o, id=counted_id(o), marks=() if _usual(o) else pytest.mark.slow) for o in MODELS),
        *(pytest.param(o, id=counted_id(o)) for o in MIXED),
        *(pytest.param(o, id="-".join(map(str, o.values()))) for o in FURTHER),
    ],
)
"""Models with mixed layers and further options; the variants that are not usual are slow."""


def small(options: dict[str, Any]) -> Any:
    return make_model(options, torch.float32, **{} if options in MIXED else {"n_layers": 3})


@each_model
@pytest.mark.parametrize("documents", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "documents"])
def test_a_training_step_reads_nothing(options: dict[str, Any], documents: bool) -> None:
    """Three layers, four segments; forward, loss, backward and optimizer, from no state and from a carried one."""
    step = training_steps(small(options), documents)
    assert [step().reads for _ in range(2)] == [[], []]


@pytest.mark.gpu
@each_model
@pytest.mark.parametrize("documents", [False, True], ids=["plain", "documents"])
def test_a_training_step_on_a_gpu_waits_for_nothing(options: dict[str, Any], documents: bool) -> None:
    """CUDA's own watch for calls that make the host wait."""
    step = training_steps(small(options).to("cuda"), documents, "cuda")
    # The first one allocates the memory, and the libraries prepare themselves.
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_model
@pytest.mark.parametrize("place", ["inside", "at the end of"])
def test_a_decoded_token_reads_nothing_but_its_id(
    options: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device refuses every read, in the middle of a segment and at its end."""
    sampled: list[torch.Tensor] = []
    monkeypatch.setattr(decoding, "sample_token", lambda logits, *_: sampled.append(logits) or 1)
    model = small(options).to("meta")
    slot = SEGMENT // 2 if place == "inside" else model.segment_length - 1
    assert decoding_calls(model, 2 * model.segment_length + slot).torn == []
    assert [logits.device.type for logits in sampled] == ["meta"]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sampling_reads_the_logits_once(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[torch.Tensor] = []

    def read(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta":
            return tensor
        reads.append(tensor)
        return torch.arange(float(VOCABULARY))

    monkeypatch.setattr(torch.Tensor, "cpu", read)
    logits = torch.empty(VOCABULARY, device="meta")
    assert decoding.sample_token(logits, temperature, 0.1, torch.Generator()) == VOCABULARY - 1
    assert len(reads) == 1


@each_model
@pytest.mark.parametrize("documents", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "documents"])
def test_a_training_step_runs_on_one_device(options: dict[str, Any], documents: bool) -> None:
    """The device `meta` has no values to read. The same operators are called there as on a CPU, but for what kernels of
    attention are made of."""
    step = training_steps(small(options).to("meta"), documents, "meta")
    assert [step().torn for _ in range(2)] == [[], []]


@each_model
def test_calls_of_every_kind_run_on_one_device(options: dict[str, Any]) -> None:
    """Padding on either side, rows at different slots, resets and carried states, with marks on the host; decoding."""
    model = make_model(options, torch.float32).to("meta").eval()
    N = model.segment_length
    ids = torch.empty(2, N + 3, dtype=torch.long, device="meta")
    mask = torch.arange(N + 3) < torch.tensor([[5], [N + 3]])
    reset = marks(2, N + 3, 0)
    reset[1] = False
    state = None
    with Calls() as calls:
        for call in ({"mask_BT": mask}, {"reset_BT": reset}, {"mask_BT": mask.flip(1)}):
            out = model(ids, state, **call)
            state = out.state
        out.hidden_BTD.sum().backward()
        with torch.no_grad():
            state = model.prefill(ids, out.state.detach(), reset)
            logits, _ = Reader.begin(model, 0).read([np.arange(N - 1)], 7).next_logits()
    assert calls.torn == []
    assert_on(state, "meta")
    assert logits.device.type == "meta"


ADDITIONS = ["recipe.sparse_writes=0.1", "recipe.sparse_loss_scale=0.1", "recipe.checkpoint_segments=2"]
EXTENSION = ["recipe.length_extension=16", "recipe.length_extension_share=1"]


@pytest.mark.parametrize(
    ("carry_state", "optimizer"), one_in(6, itertools.product([False, True], ["adamw", "adafactor", "muon"]))
)
def test_optimizers_and_additions_run_on_one_device(optimizer: str, carry_state: bool) -> None:
    """Length extension, long histories, sparse writes, few targets, a second loss and clipped gradients."""
    cfg = compose(["task=pg19", f"optimizer={optimizer}", *ADDITIONS, *EXTENSION])
    model = make_model({"name": "infini_delta"}, torch.float32).train()
    module = LanguageModelModule(model, cfg.optimizer, cfg.recipe, carry_state).to("meta")
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    steps = module.configure_optimizers()["optimizer"]
    batch = training_batch(4, SEGMENT, documents=True)
    batch["lm_targets_BT"], batch["lm_weight"] = batch["targets_BT"].clone(), 0.5
    batch["targets_BT"][:, : 3 * SEGMENT] = -100
    batch["history_PT"] = random_ids(3, 2 * SEGMENT)
    batch = module.transfer_batch_to_device(batch, torch.device("meta"), 0)
    with Calls() as calls:
        for _ in range(2):
            module.training_step(batch, 0).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            steps.zero_grad()
    assert calls.torn == []


def test_counting_sees_reads() -> None:
    ids = random_ids(2, 3)
    with Calls() as calls:
        bool((ids > 3).any())
        ids[ids > 3]
        ids[ids > 3] = 0
        ids.nonzero()
        float(ids.sum())
        torch.zeros(2, 3, device="meta") @ torch.zeros(3, 2)
    assert [name for name, _ in calls.reads] == [
        "_local_scalar_dense",
        "index",
        "index_put_",
        "nonzero",
        "_local_scalar_dense",
    ]
    assert calls.torn == ["mm"]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: x.item(),
        lambda x: np.asarray(x),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
    ],
    ids=["cpu", "to", "numpy", "tolist", "item", "asarray", "bool", "mask", "nonzero"],
)
def test_the_device_meta_refuses_reads(read: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads in a layer of a model are refused, too: a CPU does not show the first of them."""
    mix = InfiniAttention.mix_memory

    def reading(self: Any, first: torch.Tensor, *args: Any, **options: Any) -> Any:
        read(first.detach().flatten()[:1])
        return mix(self, first, *args, **options)

    monkeypatch.setattr(InfiniAttention, "mix_memory", reading)
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        training_steps(small({"name": "infini_delta"}).to("meta"), False, "meta")()


ROWS = {
    "local": "local-rotary",
    "full": "full-rotary",
    "infini_linear": "infini_linear-local-rotary",
    "infini_delta": "infini_delta-local-rotary",
    "infini_xl": "infini_xl-local",
    "transformer_xl": "transformer_xl-dai2019",
    "compressive": "compressive-mean",
    "memorizing": "memorizing",
    "rmt": "rmt-rotary",
    "autocompressor": "autocompressor-rotary",
    "llm": "llm-infini-delta-segment",
    "llm, `layers=[0]`": "llm-infini-delta-segment-partial",
    "llm, `memory=full`": "llm-full-delta-segment",
}
"""Rows of the table of counts in docs/how-to/many_devices.md, and the models that they count."""


@functools.cache
def _page() -> str:
    return (Path(__file__).parents[2] / "docs" / "how-to" / "many_devices.md").read_text(encoding="utf-8")


def _rows() -> dict[str, list[str]]:
    """The other cells of each row of the page's table, by its first cell without backticks."""
    table = _page().partition("| model | training step |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {name.replace("`", ""): others for name, *others in cells}


def _said(cell: str) -> tuple[int, int]:
    """Reads and operators of "1 (2,345)"."""
    found = re.fullmatch(r"(\d+) \(([\d,]+)\)", cell)
    assert found, cell
    return int(found[1]), int(found[2].replace(",", ""))


def test_the_page_has_the_counts_of_all_models() -> None:
    rows = _rows()
    assert list(rows) == [name.replace("`", "") for name in ROWS]
    assert {name.partition(",")[0] for name in rows} == set(registered("language_model"))
    for name, cells in rows.items():
        step, step_before, token, token_before = (_said(cell)[0] for cell in cells)
        assert (step, token) == (0, 1), name
        assert step_before > step and token_before > token, name


@pytest.mark.parametrize("row", ROWS)
def test_the_counts_of_the_page_are_those_of_today(row: str) -> None:
    """They change a little with torch and transformers, so only those that the page names are held to 1 %."""
    if row.startswith("llm"):
        pytest.importorskip("transformers")
    (options,) = (each for each in MODELS if counted_id(each) == ROWS[row])
    step_cell, _, token_cell, _ = _rows()[row.replace("`", "")]
    step = training_steps(small(options), True)
    step()
    trained = step()
    model = small(options)
    # The second of two, as the page counts: what a process keeps, such as tables of rotations, is there.
    decoded = [decoding_calls(model, 2 * model.segment_length + SEGMENT // 2) for _ in range(2)][-1]
    versions = "torch {}.{}, transformers {}.{}".format(
        *itertools.chain.from_iterable(metadata.version(name).split(".")[:2] for name in ("torch", "transformers"))
    )
    off = 0.01 if versions in _page() else 0.1
    # The copy of the logits is no operator on a CPU.
    for calls, cell, copies in ((trained, step_cell, 0), (decoded, token_cell, 1)):
        reads, operators = _said(cell)
        assert len(calls.reads) + copies == reads
        assert abs(calls.operators - operators) <= off * operators, f"{calls.operators} operators"


def test_all_models_are_counted() -> None:
    assert set(_FIRST) | {"llm"} == set(registered("language_model"))
