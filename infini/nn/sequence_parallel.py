"""One sequence over many ranks: each rank reads its own segments, and ranks exchange states, never tokens.

The memory is an associative scan over segments. For Linear (Eq. 4) the state before a rank's first segment is the sum
of what all earlier ranks add to M and z. For Linear + Delta (Eq. 5) z is such a sum; given z, the segments of a rank
are together one affine map M -> P M + Q, and the maps of the earlier ranks are composed. Local attention stays inside
segments, so nothing else crosses the boundary between two ranks. The result is that of one process: only the order of
additions differs.

A layer's exchange is an exclusive scan over W ranks in 1 + ceil(log2(W - 1)) rounds of messages to one later rank each,
float32 (float64 in float64). The size of a message does not depend on the number of tokens. Its gradient is the same
exchange in the opposite direction. This is an autograd function around batch_isend_irecv: torch's functional
collectives, which torch.compile can trace, have no differentiable message to a single rank, and with an all_gather a
rank would receive the states of all W - 1 others.

Letters: B rows, T tokens of a rank, W ranks, S segments of a rank, G key-value heads, K d_key, V d_value, X any sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from infini.nn.attention import InfiniAttention, LocalAttention
from infini.nn.decoder import Decoder
from infini.nn.grid import Grid, OffGridError, plan
from infini.nn.host import to_device, to_numpy
from infini.nn.ops.dtypes import without_autocast
from infini.nn.ops.memory import cleared
from infini.nn.protocols import ModelOutput
from infini.nn.state import State, map_state


class SequenceParallel(nn.Module):
    """A decoder or an InfiniAttention layer that reads one sequence over the ranks of a process group.

    Rank 0 reads the first segments, rank 1 the next ones, and so on; each rank whole segments only, as many as it
    likes. All ranks must hold equal weights. Outputs, states and gradients equal those of one process that reads the
    whole sequence, up to the rounding of sums in another order.

    Every rank must make the same calls, and call backward on a loss that depends on its outputs (times 0 where a rank
    has no loss), because the gradient is an exchange too. A rank's parameter gradients are those of the loss of all
    ranks through its own tokens; the whole gradient is their sum over ranks. torch's DistributedDataParallel or
    fully_shard around this module averages them, which is the gradient of the ranks' mean loss. The exchange runs
    inside the layers; a call of `module` itself is unchanged and reads a sequence in one process. torch.compile of a
    call over several ranks is not supported.

    Args:
        module: an InfiniAttention, or a Decoder of InfiniAttention and LocalAttention layers.
        group: the process group, in the order of the sequence. It needs a backend for CPU tensors, with which calls
            are planned, and one for the module's device: init_process_group("cpu:gloo,cuda:nccl") has both. Default:
            the default group.

    Source: Eq. 4 and Eq. 5 of arXiv 2404.07143; the scan over ranks is an addition to the paper.

    Raises ValueError for a module that carries anything but a compressive memory from segment to segment, and if there
    is no process group.

    Example:
        model = SequenceParallel(decoder)  # on each of W ranks
        out = model(ids[:, rank * T : (rank + 1) * T])
        state = model.state_after(out.state)  # before the next W * T tokens
    """

    def __init__(self, module: Decoder | InfiniAttention, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        is_layer = type(module) is InfiniAttention
        # A subclass of Decoder reads segments in its own way.
        layers: list[Any] = [module] if is_layer else module.attentions() if type(module) is Decoder else []
        refused = [] if layers else [module]
        refused += [layer for layer in layers if type(layer) not in (InfiniAttention, LocalAttention)]
        if refused:
            raise ValueError(
                f"{type(refused[0]).__name__}: one sequence over many ranks needs an InfiniAttention, or a Decoder of "
                "InfiniAttention and LocalAttention layers"
            )
        if group is None and not dist.is_initialized():
            raise ValueError("no process group: call torch.distributed.init_process_group first")
        self.module = module
        self.group: Any = dist.group.WORLD if group is None else group

    def forward(
        self,
        x_BT: Tensor,
        state: State | None = None,
        reset_BT: Tensor | None = None,
        write_weight_BT: Tensor | None = None,
    ) -> ModelOutput | tuple[Tensor, State]:
        """Read this rank's T tokens of each of B rows.

        Args:
            x_BT: ids [B, T] of a decoder, or inputs [B, T, D] of a layer. T is a multiple of the segment length and may
                differ from rank to rank; B may not.
            state: the state before the first token of rank 0, which alone uses it. It must be at the start of a
                segment. Default: rows that have read nothing.
            reset_BT: bool [B, T]; before a token where it is true the row's state is cleared, whatever rank it came
                from. Such a token must begin a segment. Ranks without a reset need not pass it.
            write_weight_BT: float [B, T], a factor on what a token adds to the memory. Default: 1.

        Returns:
            The result of `module`: a ModelOutput, or outputs and state. The state is the one after this rank's tokens,
            with its gradient history; on the last rank it is the state after the sequence.

        Raises ValueError on every rank if one rank's arguments do not fit.
        """
        grid, state = self._plan(x_BT, state, reset_BT, write_weight_BT)
        if isinstance(self.module, InfiniAttention):
            y_BTD, leaves = self.module.attend(x_BT, state.layers[0], grid)
            return y_BTD, State(grid.clock, (leaves,))
        hidden_BTD, layers = self.module.read(x_BT, state.layers, grid, [])
        return ModelOutput(hidden_BTD, State(grid.clock, layers), hidden_BTD.new_zeros(()))

    @torch.no_grad()
    def state_after(self, state: State) -> State:
        """The last rank's state on every rank, detached: the state after the whole sequence.

        state: what this rank's call returned. The broadcast sends M and z of every layer, and the clock's positions.
        """
        last = dist.get_global_rank(self.group, self.group.size() - 1)

        def sent(leaf: Tensor) -> Tensor:
            leaf = leaf.detach().contiguous().clone()
            dist.broadcast(leaf, last, self.group)
            return leaf

        clock = state.clock._replace(position_B=sent(state.clock.position_B))
        return State(clock, tuple(leaves._replace(memory=map_state(sent, leaves.memory)) for leaves in state.layers))

    def _plan(
        self, x_BT: Tensor, state: State | None, reset_BT: Tensor | None, write_weight_BT: Tensor | None
    ) -> tuple[Grid, State]:
        """The grid of the rank's call, with the exchange in its pieces, and the state before it."""
        B, T = x_BT.shape[:2]
        N, rank, n_ranks = self.module.segment_length, self.group.rank(), self.group.size()
        fresh, wrong = self.module.init_state(B, x_BT.device), None
        try:
            if isinstance(self.module, InfiniAttention):
                self.module.check_inputs(x_BT, state)
            elif state is not None:
                self.module.check_state(state)
        except ValueError as error:
            wrong = str(error)
        first = fresh if state is None or rank or wrong is not None else State(state.clock.on_host(), state.layers)
        if wrong is None and (T == 0 or T % N):
            wrong = f"{T} tokens: a rank reads whole segments of {N} tokens, and at least one"
        elif wrong is None and first.clock.slot_B.shape[0] != B:
            wrong = f"batch size {B}, state has {first.clock.slot_B.shape[0]}: pass a fresh init_state({B})"
        elif wrong is None and first.clock.slot_B.any():
            wrong = "the state is inside a segment: a sequence over ranks starts at the start of one"
        for name, extra in {"reset_BT": reset_BT, "write_weight_BT": write_weight_BT}.items():
            if extra is not None and extra.shape != (B, T):
                wrong = f"{name} has shape {tuple(extra.shape)}, the call {(B, T)}"
        if reset_BT is not None and reset_BT.dtype != torch.bool:
            wrong = f"reset_BT is {reset_BT.dtype}: it must be torch.bool"
        resets = None
        if wrong is None and reset_BT is not None:
            resets = to_numpy(reset_BT)
            try:
                plan(fresh.clock, T, N, None, resets, None)
            except OffGridError as error:
                wrong = str(error)

        # All ranks learn of an error of one, which would otherwise leave the others waiting for it.
        for other, (size, failed) in enumerate(self._gathered(torch.tensor([B, wrong is not None]))):
            if failed and wrong is None:
                wrong = f"rank {other} refused its part of the sequence; its error says why"
            elif wrong is None and size != B:
                wrong = f"batch size {B}, rank {other} has {int(size)}: all ranks must have the same rows"
        if wrong is not None:
            raise ValueError(wrong)

        # The rows' positions: rank 0's, then the tokens of each rank since its last reset.
        reset_B, read_B = np.zeros(B, dtype=bool), np.full(B, T)
        if resets is not None:
            reset_B |= resets.any(1)
            read_B = np.where(reset_B, resets[:, ::-1].argmax(1) + 1, T)
        mine = np.stack([first.clock.position_B.numpy(), read_B, reset_B.astype(np.int64)])
        gathered = self._gathered(torch.from_numpy(mine))
        position_B = gathered[0, 0]
        for _, earlier_B, was_reset_B in gathered[:rank]:
            position_B = np.where(was_reset_B, earlier_B, position_B + earlier_B)
        clock = fresh.clock._replace(position_B=torch.from_numpy(position_B))
        grid = plan(clock, T, N, None, resets, write_weight_BT, x_BT.device)
        if n_ranks > 1:
            cut_WB = gathered[:, 2].astype(bool)
            ranks = _Ranks(self.group, cut_WB if cut_WB.any() else None)
            grid = replace(grid, pieces=tuple(replace(piece, earlier=ranks) for piece in grid.pieces))
        return grid, State(clock, first.layers)

    def _gathered(self, values: Tensor) -> np.ndarray:
        """The int64 values of all ranks, [W, ...]."""
        gathered = [torch.empty_like(values) for _ in range(self.group.size())]
        dist.all_gather(gathered, values, self.group)
        return torch.stack(gathered).numpy()


class _Ranks:
    """The ranks before this one, as infini.nn.ops.memory.Earlier: exclusive scans over the group.

    cut_WB: bool, whether the rank resets the row; on the host. None: no rank resets any.
    """

    def __init__(self, group: dist.ProcessGroup, cut_WB: np.ndarray | None) -> None:
        self.group, self.rank, self.size, self.cut_WB = group, group.rank(), group.size(), cut_WB

    def sums(self, added_BSX: Sequence[Tensor], start_BX: Sequence[Tensor], kept_SB: Tensor | None) -> list[Tensor]:
        """The states before this rank; all in one message a round."""
        totals = [self._total(*each, kept_SB) for each in zip(added_BSX, start_BX, strict=True)]
        sum_BX = self._shift(torch.cat([total.flatten(1) for total in totals], 1), 1, 0)
        for stride in self._strides():
            sum_BX = sum_BX + self._farther(sum_BX, stride)
        parts = sum_BX.split([total[0].numel() for total in totals], 1)
        return [self._before(part.view_as(start), start) for part, start in zip(parts, start_BX, strict=True)]

    def affine(self, a_BSGKK: Tensor, b_BSGKV: Tensor, start_BGKV: Tensor, kept_SB: Tensor | None) -> Tensor:
        """M before this rank. P and Q are one message [Q | P] a round."""
        K, V = start_BGKV.shape[-2:]
        identity = torch.eye(K, dtype=start_BGKV.dtype, device=start_BGKV.device).expand(*start_BGKV.shape[:2], K, K)
        # Rank 0 knows the M that its segments start from: its map is a constant, P = 0.
        parts = (start_BGKV, torch.zeros_like(identity)) if self.rank == 0 else (torch.zeros_like(start_BGKV), identity)
        map_BGKX = torch.cat(parts, -1)
        with without_autocast(start_BGKV):
            for s, (a, b) in enumerate(zip(a_BSGKK.unbind(1), b_BSGKV.unbind(1), strict=True)):
                if kept_SB is not None:
                    map_BGKX = cleared(map_BGKX, kept_SB[s])
                map_BGKX = map_BGKX - a @ map_BGKX + nn.functional.pad(b, (0, K))
            map_BGKX = self._shift(map_BGKX, 1, 0)
            for stride in self._strides():
                farther_BGKX = self._farther(map_BGKX, stride)
                q, p = map_BGKX.split([V, K], -1)
                map_BGKX = p @ farther_BGKX + nn.functional.pad(q, (0, K))
        return self._before(map_BGKX[..., :V], start_BGKV)

    def _total(self, added_BSX: Tensor, start_BX: Tensor, kept_SB: Tensor | None) -> Tensor:
        """The state [B, ...] after this rank, if earlier ranks are left out."""
        kept_B = None
        if kept_SB is not None:
            # 1 where no reset follows the segment.
            after_SB = torch.cat([kept_SB, torch.ones_like(kept_SB[:1])]).flip(0).cumprod(0).flip(0)
            kept_B = after_SB[0]
            after_BSX = after_SB[1:].T.reshape(*added_BSX.shape[:2], *[1] * (added_BSX.dim() - 2))
            added_BSX = added_BSX.masked_fill(after_BSX == 0, 0)
        total_BX = added_BSX.sum(1)
        if self.rank > 0:
            return total_BX
        return total_BX + (start_BX if kept_B is None else cleared(start_BX, kept_B))

    def _before(self, received_BX: Tensor, start_BX: Tensor) -> Tensor:
        """The state before this rank. Rank 0 receives 0, and keeps it in the graph: all ranks exchange gradients."""
        return received_BX + start_BX if self.rank == 0 else received_BX

    def _farther(self, x_BX: Tensor, stride: int) -> Tensor:
        """x of the ranks before those that this rank's x covers; 0 in rows that one of the latter resets."""
        farther_BX = self._shift(x_BX, stride, 1)
        if self.cut_WB is None:
            return farther_BX
        kept_B = np.logical_not(self.cut_WB[max(0, self.rank - stride) : self.rank].any(0))
        return cleared(farther_BX, to_device(kept_B, farther_BX.device))

    def _strides(self) -> list[int]:
        """The ranks before this one that are covered before each further round: 1, 2, 4, ..."""
        return [1 << i for i in range((self.size - 2).bit_length())]

    def _shift(self, x: Tensor, stride: int, first: int) -> Tensor:
        """x of the rank `stride` before this one, 0 if that is before rank `first`. Differentiable."""
        # A graph on one rank only would leave the others waiting for its gradient.
        joined = torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=torch.is_grad_enabled())
        return _Shift.apply(x, joined, self, stride, first)

    def exchange(self, x: Tensor, to: int, source: int, first: int) -> Tensor:
        """Send x to rank `to` and receive from rank `source`, each if it exists; 0 if nothing is received.

        first: messages from and to lower ranks than this are left out.
        """
        x = x.contiguous()
        received, waiting = torch.zeros_like(x), []
        ranks = range(first, self.size)
        if self.rank in ranks and to in ranks:
            waiting.append(dist.P2POp(dist.isend, x, dist.get_global_rank(self.group, to), self.group))
        if self.rank in ranks and source in ranks:
            waiting.append(dist.P2POp(dist.irecv, received, dist.get_global_rank(self.group, source), self.group))
        for work in dist.batch_isend_irecv(waiting) if waiting else ():
            work.wait()
        return received


class _Shift(torch.autograd.Function):
    """_Ranks._shift; the gradient goes back to the rank that sent the value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: Tensor, ranks: _Ranks, stride: int, first: int) -> Tensor:
        ctx.ranks, ctx.stride, ctx.first = ranks, stride, first
        return ranks.exchange(x, ranks.rank + stride, ranks.rank - stride, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ranks: _Ranks = ctx.ranks
        return ranks.exchange(grad, ranks.rank - ctx.stride, ranks.rank + ctx.stride, ctx.first), *[None] * 4
