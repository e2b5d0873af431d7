"""Counts the operators of a training step and of a decoded token, and those that read a value back from the device.

A read makes the host wait for everything that a GPU has queued. `python tests/support/device_reads.py` prints the
counts of every language model.

On a CPU `.cpu()`, `.numpy()` and `.tolist()` of a tensor are no operators, so these reads are not counted there. The
device `meta` has no values: there each of them is an error, and so is an operator that reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from helpers import SEGMENT, make_model, variant_id, variants
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infini.config.compose import compose
from infini.evaluation.decoding import Reader, generate
from infini.training.module import LanguageModelModule

READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal", "bincount"}
"""Operators whose result, or its size, depends on values."""

COPIES = {"_to_copy", "copy_"}

LLM_STOCK_LAYERS: list[dict[str, Any]] = [
    {"memory": "full", "gate_init": -4.0},
    {"layers": [0]},
    {"layers": [0], "memory": "none"},
]
"""Options of `llm` with layers of transformers, which keep keys and values."""


def counted() -> list[dict[str, Any]]:
    """The options of all models whose calls are counted."""
    # The options of the first segment change values alone.
    made = [options for options in variants() if options.get("first_segment") != "zero"]
    usual = [options for options in made if options["name"] == "llm"][:1]
    return made + [{**options, **changes} for options in usual for changes in LLM_STOCK_LAYERS]


def counted_id(options: dict[str, Any]) -> str:
    """The test id of a model of `counted`."""
    return variant_id(options) + ("-partial" if options["name"] == "llm" and options.get("layers") else "")


class Calls(TorchDispatchMode):
    """Records the operators called inside a `with` block, backward passes included.

    operators: their number. reads: (name, first argument) of each that reads values: those of READS, and indices or
    assignments by a mask. torn: names of those whose operands, single numbers aside, are on different devices, other
    than copies; not all of them are refused on the device `meta`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.reads: list[tuple[str, Any]] = []
        self.torn: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        name = func.name().removeprefix("aten::").partition(".")[0]
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        if name in READS or masks:
            self.reads.append((name, args[0]))
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        if name not in COPIES and len({x.device for x in operands}) > 1:
            self.torn.append(name)
        return func(*args, **(kwargs or {}))


def training_batch(n_segments: int, segment_length: int, documents: bool, device: str = "cpu") -> dict[str, Any]:
    """Two rows as the text stream gives them. documents: with several documents in a row, each padded to the end of its
    last segment; otherwise one per row, which began earlier. The ids are on `device`, all else on the host."""
    N, shape = segment_length, (2, n_segments * segment_length)
    mask, reset = np.full(shape, not documents), np.zeros(shape, dtype=bool)
    if documents:
        for row, lengths in enumerate(([N + 3, 5, N], [N - 1, 2 * N, 3])):
            start = 0
            for length in lengths:
                reset[row, start] = mask[row, start : start + length] = True
                start += -(-length // N) * N
    ids = np.random.default_rng(0).integers(0, 31, shape)
    targets = np.where(mask, np.roll(ids, -1, 1), -100)
    return {
        "ids_BT": torch.from_numpy(ids).to(device),
        "targets_BT": torch.from_numpy(targets),
        "mask_BT": torch.from_numpy(mask),
        "reset_BT": torch.from_numpy(reset),
    }


def training_steps(model: Any, documents: bool, device: str = "cpu", n_segments: int = 4) -> Callable[[], Calls]:
    """A function that takes a training step and returns its calls: forward, loss, backward and AdamW, on a state that
    is carried from step to step."""
    cfg = compose(["task=pg19", "optimizer=adamw"])
    module = LanguageModelModule(model.train(), cfg.optimizer, cfg.recipe, carry_state=True)
    optimizer = module.configure_optimizers()["optimizer"]
    batch = training_batch(n_segments, model.segment_length, documents, device)

    def step() -> Calls:
        with Calls() as calls:
            out = module._call(batch, module.carried)
            module.carried = out.state.detach()
            loss = module._loss(out.hidden_BTD, batch["targets_BT"])
            (loss + out.aux_loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        # AdamW keeps its number of steps on the host, whatever device the parameters are on.
        counters = {id(kept["step"]) for kept in optimizer.state.values()}
        calls.reads = [(name, tensor) for name, tensor in calls.reads if id(tensor) not in counters]
        return calls

    return step


def decoding_calls(model: Any, n_before: int) -> Calls:
    """The calls of sampling one token, the most likely one, after n_before tokens and a beginning."""
    ids = np.random.default_rng(0).integers(0, 31, n_before)
    reader = Reader.begin(model.eval(), 0).read([ids], n_before)
    with torch.no_grad(), Calls() as calls:
        next(generate(reader, 1, 0.0, 1.0, torch.Generator(), ()))
    return calls


def main() -> None:
    """Print the table."""
    print(f"{'':40} {'training step':^33} {'decoded token':^23}")
    print(f"{'':40} {'plain':^16} {'documents':^16} {'in a segment':^11} {'at its end':^11}")
    for options in counted():
        made = {"options": options, "dtype": torch.float32, "n_layers": 3}
        found = []
        for documents in (False, True):
            step = training_steps(make_model(**made), documents)
            # The second of two: the state is carried, and the optimizer has its averages.
            step()
            found.append(step())
        N = make_model(**made).segment_length
        for slot in (SEGMENT // 2, N - 1):
            # The second of two: the tables of rotations, which a process keeps, are there.
            found.append([decoding_calls(make_model(**made), 2 * N + slot) for _ in range(2)][-1])
        counts = " ".join(f"{len(calls.reads):4} of {calls.operators:6}" for calls in found)
        print(f"{counted_id(options):40} {counts}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
