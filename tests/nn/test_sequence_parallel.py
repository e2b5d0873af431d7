"""One sequence over many ranks equals one process: outputs, final state, gradients of all parameters and inputs.

Each process compares its own part with the whole sequence, which it computes too.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import (
    SEGMENT,
    TOLERANCE,
    assert_close,
    assert_same_state,
    computing_in,
    make_layer,
    make_model,
    marks,
    mixed,
    random_ids,
)
from ranks import group_of_one, messages, own, run_ranks, summed_gradients
from torch.nn.parallel import DistributedDataParallel

from infini.models.infini_xl import InfiniXLAttention
from infini.nn.sequence_parallel import SequenceParallel
from infini.nn.state import leaves

B = 2
RULES: list[dict[str, Any]] = [
    {"update_rule": "linear"},
    {"update_rule": "delta"},
    {"update_rule": "delta", "delta_normaliser": "current"},
    {"update_rule": "linear", "memory_decay": 100.0},
    {"update_rule": "delta", "memory_decay": 100.0},
    {"update_rule": "delta", "input_gate": "sigmoid"},
]
SIZES: dict[str, Any] = {"n_heads": 4, "d_model": 16, "n_kv_heads": 2, "d_value": 4}
SEGMENTS = {1: [8], 2: [3, 5], 4: [1, 3, 2, 2]}
"""World size -> segments of each rank: 8 of the sequence."""
MODELS: list[dict[str, Any]] = [
    {"name": "infini_linear"},
    {"name": "infini_delta", "first_segment": "zero"},
    mixed("linear", "local", "delta"),
]


def lengths_of(n_ranks: int) -> list[int]:
    return [n * SEGMENT for n in SEGMENTS[n_ranks]]


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def seeded(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def resets(n_tokens: int) -> dict[str, torch.Tensor | None]:
    """Name -> marks [B, n_tokens]: none; in one row inside a rank's part, twice in one rank's, in the other row at the
    sequence's start and at a rank's first token."""
    mask = marks(B, n_tokens)
    mask[0, [2 * SEGMENT, 6 * SEGMENT, 7 * SEGMENT]] = True
    mask[1, [0, 4 * SEGMENT]] = True
    return {"none": None, "inside": mask}


def compare_layer(options: dict[str, Any], how: str, probed: slice, products: torch.dtype = torch.float64) -> None:
    """A layer that continues from a state, with write weights; the loss is on the ranks of the slice alone."""
    lengths = lengths_of(dist.get_world_size())
    T, dtype, tolerance = sum(lengths), torch.promote_types(products, torch.float32), TOLERANCE[products]
    layer = make_layer(**SIZES, **options).to(dtype)
    reset_BT, weight_BT = resets(T)[how], seeded(B, T, seed=5, dtype=dtype).sigmoid()
    x_BTD, probe = (seeded(B, T, layer.d_model, seed=seed, dtype=dtype) for seed in (3, 4))
    x_BTD.requires_grad_()
    counted = torch.zeros(B, T, 1, dtype=dtype)
    for part in counted.split(lengths, 1)[probed]:
        part.fill_(1.0)
    probe = probe * counted
    before = layer(seeded(B, 2 * SEGMENT, layer.d_model, seed=6, dtype=dtype))[1].detach()

    with computing_in(products):
        y_BTD, after = layer(x_BTD, before, reset_BT=reset_BT, write_weight_BT=weight_BT)
    (y_BTD * probe).sum().backward()
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    x_grad, x_BTD.grad = x_BTD.grad, None
    layer.zero_grad()

    parallel = SequenceParallel(layer)
    own_reset = None if reset_BT is None else own(reset_BT, lengths)
    x = own(x_BTD.detach(), lengths).clone().requires_grad_()
    # Only rank 0 uses the state; marks that are all false may be left out.
    with computing_in(products):
        y, state = parallel(
            x,
            before if dist.get_rank() == 0 else None,
            reset_BT=own_reset if own_reset is None or own_reset.any() else None,
            write_weight_BT=own(weight_BT, lengths),
        )
    (y * own(probe, lengths)).sum().backward()
    assert_close(y, own(y_BTD, lengths), tolerance, f"{options} {how}: outputs")
    if is_last():
        assert_same_state(state, after, tolerance)
    assert_same_state(parallel.state_after(state), after.detach(), tolerance)
    assert_close(x.grad, own(x_grad, lengths), tolerance, f"{options} {how} {probed}: gradient of the inputs")
    for name, grad in summed_gradients(layer).items():
        assert_close(grad, expected[name], tolerance, f"{options} {how} {probed}: gradient of {name}")


def compare_decoder(options: dict[str, Any], checkpointed: bool) -> None:
    """A decoder that reads two sequences, the second one from the state of the first."""
    lengths = lengths_of(dist.get_world_size())
    T, tolerance = sum(lengths), TOLERANCE[torch.float64]
    model = make_model(options)
    ids_BT, reset_BT = random_ids(B, 2 * T), torch.cat([marks(B, T), resets(T)["inside"]], 1)
    probe = seeded(B, 2 * T, 16)

    def read(model: Any, call: int, state: Any, part: Any) -> Any:
        columns = slice(call * T, (call + 1) * T)
        out = model(part(ids_BT[:, columns]), state, reset_BT=part(reset_BT[:, columns]))
        loss = (out.hidden_BTD * part(probe[:, columns])).sum()
        return out, loss

    first, loss = read(model, 0, None, lambda x: x)
    loss.backward()
    second, loss = read(model, 1, first.state.detach(), lambda x: x)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    model.zero_grad()
    model.checkpoint_activations = checkpointed
    parallel, state = SequenceParallel(model), None
    for call, whole in enumerate((first, second)):
        out, loss = read(parallel, call, state, functools.partial(own, lengths=lengths))
        loss.backward()
        assert_close(out.hidden_BTD, own(whole.hidden_BTD, lengths), tolerance, f"{options}: hidden states of {call}")
        if is_last():
            assert_same_state(out.state, whole.state, tolerance)
        state = parallel.state_after(out.state)
        assert_same_state(state, whole.state.detach(), tolerance)
    for name, grad in summed_gradients(model).items():
        reference = torch.zeros_like(grad) if expected[name] is None else expected[name]
        assert_close(grad, reference, tolerance, f"{options}: gradient of {name}")


def compare_data_parallel(options: dict[str, Any]) -> None:
    """DistributedDataParallel around it: the gradient of the ranks' mean loss, on every rank."""
    n_ranks = dist.get_world_size()
    lengths = [SEGMENT * 2] * n_ranks
    model, ids_BT = make_model(options), random_ids(B, sum(lengths))
    model.head(model(ids_BT).hidden_BTD).logsumexp(-1).mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    averaged = DistributedDataParallel(SequenceParallel(model))
    out = averaged(own(ids_BT, lengths))
    model.head(out.hidden_BTD).logsumexp(-1).mean().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], TOLERANCE[torch.float64], f"{options}: gradient of {name}")


def compare_sharded(options: dict[str, Any]) -> None:
    """FSDP2 and sequences over ranks in one mesh: half of the ranks read one row, the other half the other one."""
    # Slow to import, in each process; only this case needs them.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    n_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, n_ranks // 2), mesh_dim_names=("rows", "sequence"))
    every = mesh["rows", "sequence"]._flatten("all")
    lengths = [SEGMENT * 2] * (n_ranks // 2)
    model, ids_BT = make_model(options), random_ids(B, sum(lengths))
    model.head(model(ids_BT).hidden_BTD).logsumexp(-1).mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    parallel = SequenceParallel(model, mesh["sequence"].get_group())
    for block in model.blocks:
        fully_shard(block, mesh=every)
    fully_shard(parallel, mesh=every)
    row = mesh["rows"].get_local_rank()
    part = ids_BT[row : row + 1].split(lengths, 1)[mesh["sequence"].get_local_rank()]
    model.head(parallel(part).hidden_BTD).logsumexp(-1).mean().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad.full_tensor(), expected[name], TOLERANCE[torch.float64], f"gradient of {name}")


def rounds(n_ranks: int) -> int:
    """Rounds of the exchange of a layer, as the documentation says."""
    return 1 + math.ceil(math.log2(n_ranks - 1)) if n_ranks > 1 else 0


def measure_bytes(options: dict[str, Any]) -> None:
    """A rank sends the same bytes for any number of tokens. The largest number is that of the documented formula, in
    the forward and in the backward pass."""
    n_ranks, K, V, G = dist.get_world_size(), 6, SIZES["d_value"], SIZES["n_kv_heads"]
    layer = make_layer(**SIZES, **options)
    measured = []
    for n_segments in (1, 2, 16):
        x_BTD = seeded(B, n_segments * SEGMENT, layer.d_model, seed=dist.get_rank())
        with messages() as sent:
            parallel = SequenceParallel(layer)
            y_BTD, state = parallel(x_BTD)
            there = sum(sent["states"])
            y_BTD.sum().backward()
            total = sum(sent["states"])
            parallel.state_after(state)
        # Clocks of each rank, to plan the call; and M, z and the positions of the last rank.
        assert sum(sent["clocks"]) == 16 + 24 * B
        assert sum(sent["broadcasts"]) == 8 * B * (G * K * (V + 1) + 1)
        ways = torch.tensor([there, total - there])
        dist.all_reduce(ways, dist.ReduceOp.MAX)
        everything = torch.tensor([there, total - there])
        dist.all_reduce(everything)
        assert everything[0] == everything[1], "forward and backward"
        measured.append((there, total, *ways.tolist()))
    assert len(set(measured)) == 1, measured
    # A map [K, K] for each sum that is no plain one.
    maps = 2 if "memory_decay" in options else int(options["update_rule"] == "delta")
    floats = K * (V + 1) + maps * K * K
    largest = 8 * B * G * floats * rounds(n_ranks)
    assert measured[0][2:] == (largest, largest)


def refuse() -> None:
    """An error of one rank is one of every rank: none waits for it."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    parallel = SequenceParallel(make_layer(**SIZES))
    fits = seeded(B, SEGMENT, 16)

    def refused(expected: str, of_others: str, *args: Any, **call: Any) -> None:
        with pytest.raises(ValueError) as error:
            parallel(*args, **call)
        assert str(error.value) == (expected if rank == n_ranks - 1 else of_others)

    says_why = f"rank {n_ranks - 1} refused its part of the sequence; its error says why"
    x_BTD = fits[:, :-1] if is_last() else fits
    refused(f"7 tokens: a rank reads whole segments of {SEGMENT} tokens, and at least one", says_why, x_BTD)
    reset_BT = marks(B, SEGMENT, 3) if is_last() else None
    refused(f"row 0, column 3: a reset inside a segment of {SEGMENT} tokens", says_why, fits, reset_BT=reset_BT)
    weight_BT = torch.ones(B, 3) if is_last() else None
    refused("write_weight_BT has shape (2, 3), the call (2, 8)", says_why, fits, write_weight_BT=weight_BT)
    if n_ranks > 1:
        sizes = "all ranks must have the same rows"
        x_BTD = fits[:1] if is_last() else fits
        refused(f"batch size 1, rank 0 has 2: {sizes}", f"batch size 2, rank {n_ranks - 1} has 1: {sizes}", x_BTD)
    wide = seeded(B, SEGMENT, 17) if is_last() else fits
    refused("x must be [B, T, d_model=16], got [2, 8, 17]", says_why, wide)
    other = [] if is_last() else None
    refused("state is a list: it must be the second value that a call returned", says_why, fits, other)
    _, inside = parallel.module(fits[:, :3])
    with pytest.raises(ValueError, match="inside a segment" if rank == 0 else "rank 0 refused"):
        parallel(fits, inside)
    # The group is still in step.
    parallel(fits)


def compare_some() -> None:
    """The cases of the default run."""
    for options in RULES[:2]:
        compare_layer(options, "inside", slice(None))
        compare_layer(options, "none", slice(-1, None))
        measure_bytes(options)
    compare_decoder(MODELS[2], checkpointed=True)
    compare_data_parallel({"name": "infini_delta"})
    refuse()


def compare_all() -> None:
    for options in RULES:
        for how in ("none", "inside"):
            for probed in (slice(None), slice(0, 1), slice(-1, None)):
                compare_layer(options, how, probed)
        for products in (torch.float32, torch.bfloat16):
            compare_layer(options, "inside", slice(None), products)
        measure_bytes(options)
    for model in MODELS:
        for checkpointed in (False, True):
            compare_decoder(model, checkpointed)
    for model in MODELS[:2]:
        compare_data_parallel(model)
        compare_sharded(model)


def test_one_rank_is_one_process(tmp_path: Path) -> None:
    """Exactly: there is no exchange."""
    layer, x_BTD = make_layer(**SIZES), seeded(B, 3 * SEGMENT, 16)
    with group_of_one(tmp_path):
        compare_some()
        with messages() as sent:
            y_BTD, state = SequenceParallel(layer)(x_BTD)
        assert not sent["states"]
    expected, after = layer(x_BTD)
    assert torch.equal(y_BTD, expected)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(leaves(state), leaves(after), strict=True))


def compare_rules() -> None:
    for options in RULES[:2]:
        compare_layer(options, "inside", slice(None))
        measure_bytes(options)


def test_two_ranks_are_one_process() -> None:
    run_ranks(compare_rules, 2)


@pytest.mark.slow
def test_many_ranks_are_one_process() -> None:
    """Four: the scan has a second round, and rows share a mesh with sequences."""
    run_ranks(compare_some, 4)


@pytest.mark.slow
def test_every_combination_over_many_ranks() -> None:
    run_ranks(compare_all, 4, 2)


def test_a_layer_that_keeps_more_than_a_memory_is_refused(tmp_path: Path) -> None:
    says = "one sequence over many ranks needs an InfiniAttention, or a Decoder of InfiniAttention and LocalAttention"
    with group_of_one(tmp_path):
        for module in (InfiniXLAttention(8, 2, 4, 4), make_model(mixed("linear", "xl")), make_model({"name": "rmt"})):
            with pytest.raises(ValueError, match=says):
                SequenceParallel(module)


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="no process group: call torch.distributed.init_process_group first"):
        SequenceParallel(make_layer())


def compare_not_finite() -> None:
    """A document that is not finite ends at a reset, on whatever rank, as in one process."""
    end = 5 * SEGMENT
    for options in (
        {"update_rule": "linear"},
        {"update_rule": "delta"},
        {"update_rule": "linear", "memory_decay": 9.0},
    ):
        layer, lengths = make_layer(**options, **SIZES), lengths_of(dist.get_world_size())
        x_BTD, reset_BT = seeded(B, sum(lengths), 16), torch.zeros(B, sum(lengths), dtype=torch.bool)
        x_BTD[0, SEGMENT + 1], reset_BT[0, end] = math.nan, True
        expected = layer(x_BTD, reset_BT=reset_BT)[0]
        assert torch.isfinite(expected[:, end:]).all() and torch.isfinite(expected[1]).all()
        y_BTD, _ = SequenceParallel(layer)(own(x_BTD, lengths), None, own(reset_BT, lengths))
        assert_close(y_BTD.nan_to_num(9.0), own(expected, lengths).nan_to_num(9.0), 1e-10, "outputs")


@pytest.mark.slow
def test_a_document_that_is_not_finite_ends_at_a_reset_on_any_rank() -> None:
    run_ranks(compare_not_finite, 4)


def test_what_a_rank_cannot_read_is_refused_before_the_others_wait(tmp_path: Path) -> None:
    """The model itself refuses it, too. A TypeError of one rank left the others in the exchange."""
    model, ids = make_model(MODELS[0]), random_ids(B, 2 * SEGMENT)
    wide = model(ids).state
    with group_of_one(tmp_path):
        parallel = SequenceParallel(model)
        for dtype in (torch.float32, torch.int64):
            with pytest.raises(ValueError, match=f"^reset_BT is {dtype}: it must be torch.bool$"):
                parallel(ids, None, torch.ones(B, 2 * SEGMENT, dtype=dtype))
        model.resize_segments(SEGMENT // 2)
        with pytest.raises(ValueError, match="^state of another model: for one row, "):
            parallel(ids, wide)
