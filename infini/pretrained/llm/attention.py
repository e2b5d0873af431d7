"""Infini-attention on the queries, keys and values of a family's own attention, before the rotary embedding.

One mechanism for every family. What a family adds (biases, norms, fused projections, scales, soft caps) is done before
or inside the stock attention kernel that is called here; the mathematics of the memory are `infini.nn.ops`. The memory
is computed in float32 (float64 in float64), whatever the model's dtype and autocast say.

Rotary positions count within the segment, so scores are the base model's for any two tokens that see each other, and no
position grows with the document.

Letters: B rows, S segments, N segment length, T tokens, X sinks, H query heads, G key-value heads, K d_key, V d_value,
R rotary width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from infini.nn.host import to_device
from infini.nn.ops import memory as ops
from infini.nn.ops.dtypes import autocasts, state_dtype, without_autocast
from infini.nn.ops.memory import Memory
from infini.nn.protocols import Keep, Projection
from infini.nn.state import map_state, place_rows, select_rows, state_class
from infini.pretrained.llm.plan import Columns, Group, Piece, SingleTokens, pieces
from infini.pretrained.llm.settings import InfiniSettings

Wanted = Literal["reads", "remains", "writes"]
"""The kinds of values that a layer asks its InfiniGate for."""
NAME = "infini"
"""The name under which the attention is registered with transformers."""


@state_class
class Window(NamedTuple):
    """Rotated keys [B, G, N, K] and values [B, G, N, V] of the unfinished segment; entries beyond the row's slot are
    undefined."""

    k_BGNK: Tensor
    v_BGNV: Tensor


@state_class
class Before(NamedTuple):
    """The segment before (window=previous), and the memory of what is older than it.

    k_BGNK, v_BGNV: as this segment sees them. next_k_BGNK: the unfinished segment's keys as the next one will see them.
    """

    memory: Memory
    k_BGNK: Tensor
    v_BGNV: Tensor
    next_k_BGNK: Tensor


@state_class
class Sinks(NamedTuple):
    """Rotated keys [B, G, X, K] and values [B, G, X, V] of the document's first tokens (sinks=X)."""

    k_BGXK: Tensor
    v_BGXV: Tensor


@state_class
class LayerState(NamedTuple):
    """The state that a layer carries from call to call. Its size does not depend on the document's length.

    memory: M and z of all finished segments (Eq. 4 and 5). pending: the same with the unfinished segment's tokens, as
    both rules read only what was there when the segment began.
    """

    window: Window
    memory: Memory
    pending: Memory
    before: Before | tuple[()]
    sinks: Sinks | tuple[()]


class Call:
    """One forward pass: the plan of the host, the state of each layer before the pass, and the state after it.

    Not a dataclass: FSDP2 passes copies of the dataclasses among a layer's arguments, and layers write their states
    here.
    """

    def __init__(
        self,
        groups: list[Group | SingleTokens],
        columns_B: list[Columns],
        columns: int,
        mask_BT: Tensor | None,
        tables: dict[str | None, tuple[Tensor, Tensor]],
        keep: bool,
        again: bool = False,
    ) -> None:
        """columns_B: of each row, the columns of its real tokens. tables: cosines and sines [positions, R] by layer
        type. keep: whether states are asked for. again: whether the backward pass may call layers again, with the
        states before the pass."""
        self.groups, self.columns_B, self.columns, self.mask_BT = groups, columns_B, columns, mask_BT
        self.tables, self.keep, self.again = tables, keep, again
        self.states: dict[int, LayerState | None] = {}
        self.results: dict[int, LayerState] = {}
        self.detached = False
        """Whether layers ran without gradients in a call with `again`: checkpointing with use_reentrant=True."""
        self.written: dict[int, tuple[Layer, Tensor, Tensor]] | None = None
        """If a dictionary, it collects each layer's writes (keys before their rotary embedding, values) for a
        rollback."""


@dataclass
class Layer:
    """The computations of one layer."""

    module: Any
    settings: InfiniSettings
    cos_PR: Tensor
    sin_PR: Tensor
    kernel_options: dict[str, Any]

    def rotate(self, q_BHTK: Tensor, k_BGTK: Tensor, positions: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by the family's own rotary embedding. positions: a slice for all rows, or [B, T]."""
        if not getattr(self.module, "use_rope", True):
            return q_BHTK, k_BGTK
        cos, sin = self.cos_PR[positions], self.sin_PR[positions]
        if isinstance(positions, slice):
            cos, sin = cos[None], sin[None]
        return _stock(self.module).apply_rotary_pos_emb(q_BHTK, k_BGTK, cos, sin)

    def rotate_keys(self, k_BGTK: Tensor, positions: slice | Tensor) -> Tensor:
        """Like `rotate`, for keys alone."""
        return self.rotate(k_BGTK[:, :1], k_BGTK, positions)[1]

    def attend(self, q_BHTK: Tensor, k_BGYK: Tensor, v_BGYV: Tensor, mask: Tensor | None) -> Tensor:
        """A_dot of Eq. 2 by the stock kernel -> [B, H, T, V]. The queries are the last T of the Y keys; mask (bool,
        true: visible) where a row sees fewer."""
        T, Y = q_BHTK.shape[2], k_BGYK.shape[2]
        eager = self.settings.local_attention == "eager"
        if mask is None and T > 1 and (eager or T < Y):
            # Without a mask the stock kernel would take the first T keys.
            mask = torch.ones(T, Y, dtype=torch.bool, device=q_BHTK.device).tril(Y - T)[None, None]
        if eager and mask is not None:
            shut = torch.finfo(q_BHTK.dtype).min
            mask = torch.zeros_like(mask, dtype=q_BHTK.dtype).masked_fill(~mask, shut)
        a_BTHV, _ = _kernel(self.module, self.settings)(
            self.module, q_BHTK, k_BGYK, v_BGYV, mask, **self.kernel_options
        )
        return a_BTHV.transpose(1, 2)

    def mix(self, a_BSHTV: Tensor, q_BSHTK: Tensor, read: Memory, first: Tensor | bool | None) -> Tensor:
        """Eq. 3 and 6: what the queries read of the memory [B, S, G, ...], mixed with A_dot by the gate.

        first: true where there is nothing to read yet, broadcastable to [B, S, H, T, 1].
        """
        B, S, H, T, K = q_BSHTK.shape
        G = read.m_BGKV.shape[2]
        with without_autocast(q_BSHTK):
            # Query head h reads the memory of key-value head h // (H / G): its queries are further rows of a product.
            sq = ops.sigma(_exact(q_BSHTK).unflatten(2, (G, H // G)).flatten(3, 4))
            found = ops.retrieve(sq, read.m_BGKV, read.z_BGK)
            numerator, denominator = (x.unflatten(3, (H // G, T)).flatten(2, 3) for x in found)
            g = self.module.infini_gate(denominator)
            if isinstance(first, bool):
                first = torch.ones((), dtype=torch.bool, device=g.device) if first else None
            return ops.gate(a_BSHTV, numerator, denominator, g, first, self.settings.first_segment)

    def scan(self, k_BSGNK: Tensor, v_BSGNV: Tensor, before: Memory, complete: bool) -> tuple[Memory, Memory]:
        """Eq. 4 or 5: the memory that each segment begins with, and the one after the last. complete: whether the
        segments end with these tokens, so that the memory decays after each."""
        rule = self.settings.update_rule
        with without_autocast(k_BSGNK):
            decay_BSG = self._remains(before) if complete else None
            k = _exact(k_BSGNK)
            sums = ops.TokenSums(ops.sigma(k), _exact(v_BSGNV), self._write_weights(k))
            return ops.scan_sums(sums, before, rule=rule, decay_BSG=decay_BSG)

    def end_segment(self, pending: Memory) -> Memory:
        """The memory after a finished segment, of which `pending` holds all tokens."""
        with without_autocast(pending.z_BGK):
            decay_BSG = self._remains(pending)
            if decay_BSG is None:
                return pending
            decay_BGK = decay_BSG[0, :, :, None]
            return Memory(decay_BGK[..., None] * pending.m_BGKV, decay_BGK * pending.z_BGK)

    def _remains(self, like: Memory) -> Tensor | None:
        """The share of each head's memory that remains after a segment [1, 1, G]; None: all of it (the paper)."""
        if self.settings.memory_decay is None:
            return None
        return self.module.infini_gate(like.z_BGK, "remains")

    def _write_weights(self, k_BSGNK: Tensor) -> Tensor | None:
        """Factors on what the tokens add to the memory [B, S, G, N]; None: 1 (the paper)."""
        if not self.settings.input_gate:
            return None
        return self.module.infini_gate(k_BSGNK, "writes")

    def add(self, k_BGTK: Tensor, v_BGTV: Tensor, began: Memory, pending: Memory) -> Memory:
        """`pending` with further tokens of a segment that began with the memory `began`: Eq. 4 or 5, token by token."""
        with without_autocast(k_BGTK):
            k, v = _exact(k_BGTK)[:, None], _exact(v_BGTV)[:, None]
            sk = ops.sigma(k)
            if self.settings.update_rule == "delta":
                numerator, denominator = ops.retrieve(sk, began.m_BGKV[:, None], began.z_BGK[:, None])
                # A read from an empty memory gives 0 / 0, which counts as 0.
                empty = (began.z_BGK.sum(-1) <= 0)[:, None, :, None, None]
                v = v - numerator / denominator.masked_fill(empty, 1.0)
            return ops.scan_sums(ops.TokenSums(sk, v, self._write_weights(k)), pending, rule="linear")[1]


def _exact(x: Tensor) -> Tensor:
    return x.to(state_dtype(x.dtype))


def _stock(module: Any) -> Any:
    """The module of transformers that defines the family's attention class."""
    return sys.modules[getattr(type(module), "family_module", type(module).__module__)]


def _kernel(module: Any, settings: InfiniSettings) -> Callable[..., Any]:
    eager = _stock(module).eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(settings.local_attention, eager)


def empty_memory(k_BGTK: Tensor, v_BGTV: Tensor) -> Memory:
    """The memory of rows with such keys and values that have read nothing."""
    sizes, exact = (*k_BGTK.shape[:2], k_BGTK.shape[3]), state_dtype(k_BGTK.dtype)
    return Memory(k_BGTK.new_zeros(*sizes, v_BGTV.shape[3], dtype=exact), k_BGTK.new_zeros(sizes, dtype=exact))


def empty_state(k_BGTK: Tensor, v_BGTV: Tensor, settings: InfiniSettings, keep: bool) -> LayerState:
    """The state of rows that have read nothing. Without `keep` it has no room for later calls."""

    def zeros(tokens: int) -> tuple[Tensor, Tensor]:
        k, v = (x.new_zeros(*x.shape[:2], tokens, x.shape[3]) for x in (k_BGTK, v_BGTV))
        return k, v

    N, X = settings.segment_length, settings.sinks
    room, memory = N if keep else 0, empty_memory(k_BGTK, v_BGTV)
    before = Before(memory, *zeros(N), zeros(room)[0]) if settings.depth == 2 else ()
    return LayerState(Window(*zeros(room)), memory, memory, before, Sinks(*zeros(X)) if X else ())


def _writable(buffer: Tensor) -> Tensor:
    """The buffer itself if nothing else needs its content, else a copy."""
    frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()
    return buffer.clone() if torch.is_grad_enabled() or frozen else buffer


def _write(buffer_BGNK: Tensor, slot: int, x_BGTK: Tensor) -> Tensor:
    buffer_BGNK = _writable(buffer_BGNK)
    buffer_BGNK[:, :, slot : slot + x_BGTK.shape[2]] = x_BGTK.to(buffer_BGNK.dtype)
    return buffer_BGNK


def _next_segment(layer: Layer, state: LayerState) -> LayerState:
    """The state at a segment boundary: the pending memory becomes the memory, the finished segment the previous one."""
    before, window, memory = state.before, state.window, layer.end_segment(state.pending)
    if before:
        # The older buffers are taken over to be written next.
        fresh = Before(state.memory, before.next_k_BGNK, window.v_BGNV, before.k_BGNK)
        before, window = fresh, Window(window.k_BGNK, before.v_BGNV)
    return state._replace(window=window, memory=memory, pending=memory, before=before)


def _with_new_sinks(
    layer: Layer, state: LayerState, slot: int, k_BGTK: Tensor, v_BGTV: Tensor, keep: bool
) -> LayerState:
    """The state with the sinks among the tokens of a document's first segment, from `slot` on."""
    n = min(layer.settings.sinks - slot, k_BGTK.shape[2])
    if not state.sinks or n <= 0:
        return state
    k = layer.rotate_keys(k_BGTK[:, :, :n], slice(slot, slot + n))
    v = v_BGTV[:, :, :n]
    if keep:
        k, v = (_write(old, slot, new) for old, new in zip(state.sinks, (k, v), strict=True))
    return state._replace(sinks=Sinks(k, v))


def _whole_segments(
    layer: Layer, q_BHTK: Tensor | None, k_BGTK: Tensor, v_BGTV: Tensor, state: LayerState, piece: Piece, keep: bool
) -> tuple[Tensor | None, LayerState]:
    """`piece.whole` segments at once, folded into the rows -> [B, H, T, V] and the state after them."""
    settings = layer.settings
    S, N, depth = piece.whole, settings.segment_length, settings.depth
    if piece.segment == 0:
        state = _with_new_sinks(layer, state, 0, k_BGTK, v_BGTV, keep)
    k_BSGNK, v_BSGNV = (x.unflatten(2, (S, N)).transpose(1, 2) for x in (k_BGTK, v_BGTV))
    began, last = layer.scan(k_BSGNK, v_BSGNV, state.memory, complete=True)
    read, before = began, state.before
    k_before_BSGNK, v_before_BSGNV = k_BSGNK, v_BSGNV
    if before:
        seen = layer.rotate_keys(k_BSGNK.flatten(0, 1), slice(settings.sinks, settings.sinks + N))
        seen_BSGNK = seen.unflatten(0, (-1, S))
        k_before_BSGNK, v_before_BSGNV = (
            _shifted(old, new) for old, new in ((before.k_BGNK, seen_BSGNK), (before.v_BGNV, v_BSGNV))
        )
        read = map_state(_shifted, before.memory, began)
        # Copies: a view would keep what all segments hold.
        k, v = (_last(new).to(old.dtype) for old, new in ((before.k_BGNK, seen_BSGNK), (before.v_BGNV, v_BSGNV)))
        before = Before(map_state(_last, began), k, v, before.next_k_BGNK)
    a_BHTV = None
    if q_BHTK is not None:
        q_BSHNK = q_BHTK.unflatten(2, (S, N)).transpose(1, 2)
        own = slice(settings.own_position, settings.own_position + N)
        q, k = layer.rotate(q_BSHNK.flatten(0, 1), k_BSGNK.flatten(0, 1), own)
        parts: list[Sequence[Tensor]] = []
        if state.sinks and piece.segment >= depth:
            parts.append([x.repeat_interleave(S, 0) for x in state.sinks])
        if before and piece.segment >= 1:
            parts.append([k_before_BSGNK.flatten(0, 1), v_before_BSGNV.flatten(0, 1)])
        a_BSHNV = _attend_parts(layer, q, [*parts, [k, v_BSGNV.flatten(0, 1)]]).unflatten(0, (-1, S))
        first_S = torch.arange(piece.segment, piece.segment + S, device=q.device) < depth
        a_BSHNV = layer.mix(a_BSHNV, q_BSHNK, read, first_S[:, None, None, None])
        a_BHTV = a_BSHNV.transpose(1, 2).flatten(2, 3)
    return a_BHTV, state._replace(memory=last, pending=last, before=before)


def _shifted(before: Tensor, x_BS: Tensor) -> Tensor:
    """The previous segment's x for each segment, and `before` for the first."""
    return torch.cat([before[:, None].to(x_BS.dtype), x_BS[:, :-1]], 1)


def _last(x_BS: Tensor) -> Tensor:
    return x_BS[:, -1].clone()


def _attend_parts(
    layer: Layer, q_BHTK: Tensor, parts: Sequence[Sequence[Tensor]], mask: Tensor | None = None
) -> Tensor:
    """A_dot over keys and values in parts, one after the other; the queries are the last tokens of the last part."""
    k, v = (
        each[0] if len(each) == 1 else torch.cat([part.to(each[-1].dtype) for part in each], 2)
        for each in zip(*parts, strict=True)
    )
    if not autocasts(q_BHTK):
        # A cache may have been read in another dtype.
        k, v = k.to(q_BHTK.dtype), v.to(q_BHTK.dtype)
    return layer.attend(q_BHTK, k, v, mask)


def _part_of_a_segment(
    layer: Layer, q_BHTK: Tensor | None, k_BGTK: Tensor, v_BGTV: Tensor, state: LayerState, piece: Piece, keep: bool
) -> tuple[Tensor | None, LayerState]:
    """Tokens of one segment from `piece.slot` on, at the same place for all rows -> [B, H, T, V] and the state."""
    settings = layer.settings
    slot, stop = piece.slot, piece.slot + k_BGTK.shape[2]
    if piece.segment == 0:
        state = _with_new_sinks(layer, state, slot, k_BGTK, v_BGTV, keep)
    own = slice(settings.own_position + slot, settings.own_position + stop)
    q_own, k_own = layer.rotate(k_BGTK[:, :1] if q_BHTK is None else q_BHTK, k_BGTK, own)
    before, window = state.before, state.window
    k_seen, v_seen = k_own, v_BGTV
    if keep:
        window = Window(_write(window.k_BGNK, slot, k_own), _write(window.v_BGNV, slot, v_BGTV))
        k_seen, v_seen = (x[:, :, :stop] for x in window)
        if before:
            seen = layer.rotate_keys(k_BGTK, slice(settings.sinks + slot, settings.sinks + stop))
            before = before._replace(next_k_BGNK=_write(before.next_k_BGNK, slot, seen))
    a_BHTV = None
    if q_BHTK is not None:
        parts: list[Sequence[Tensor]] = [state.sinks] if state.sinks and piece.segment >= settings.depth else []
        if before and piece.segment >= 1:
            parts.append([before.k_BGNK, before.v_BGNV])
        a = _attend_parts(layer, q_own, [*parts, [k_seen, v_seen]])[:, None]
        read = map_state(lambda x: x[:, None], before.memory if before else state.memory)
        a_BHTV = layer.mix(a, q_BHTK[:, None], read, piece.segment < settings.depth)[:, 0]
    if slot == 0:
        pending = layer.scan(k_BGTK[:, None], v_BGTV[:, None], state.memory, complete=False)[1]
    else:
        pending = layer.add(k_BGTK, v_BGTV, state.memory, state.pending)
    state = state._replace(window=window, pending=pending, before=before)
    return a_BHTV, _next_segment(layer, state) if stop == settings.segment_length else state


def _attend_group(
    layer: Layer, q_BHTK: Tensor | None, k_BGTK: Tensor, v_BGTV: Tensor, state: LayerState, group: Group, keep: bool
) -> tuple[Tensor | None, LayerState]:
    settings, outputs = layer.settings, []
    alike = settings.depth == 1 and not settings.sinks
    for piece in pieces(group, settings.segment_length, settings.depth, alike):
        span = slice(piece.start, piece.stop)
        q = None if q_BHTK is None else q_BHTK[:, :, span]
        step = _whole_segments if piece.whole else _part_of_a_segment
        a, state = step(layer, q, k_BGTK[:, :, span], v_BGTV[:, :, span], state, piece, keep)
        outputs.append(a)
    if q_BHTK is None:
        return None, state
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)), state  # type: ignore[arg-type]


def _attend_single(
    layer: Layer,
    q_BH1K: Tensor | None,
    k_BG1K: Tensor,
    v_BG1V: Tensor,
    state: LayerState,
    rows: SingleTokens,
    keep: bool,
) -> tuple[Tensor | None, LayerState]:
    """One token in each row, at different places in their segments -> [B, H, 1, V] and the state."""
    settings, device = layer.settings, k_BG1K.device
    N, X, depth = settings.segment_length, settings.sinks, settings.depth
    slot_B, segment_B = (to_device(np.array(x), device) for x in (rows.slots, rows.segments))
    row_B = torch.arange(len(rows.slots), device=device)
    most = max(rows.slots) + 1

    def put(buffer: Tensor, x_BG1K: Tensor, at: Tensor = row_B) -> Tensor:
        buffer = _writable(buffer)
        buffer[at, :, slot_B[at]] = x_BG1K[at, :, 0].to(buffer.dtype)
        return buffer

    places = enumerate(zip(rows.slots, rows.segments, strict=True))
    early = [i for i, (slot, segment) in places if segment == 0 and slot < X]
    if early:
        at = to_device(np.array(early), device)
        k_sink = layer.rotate_keys(k_BG1K, slot_B[:, None].clamp(max=X - 1))
        state = state._replace(
            sinks=Sinks(*(put(*pair, at) for pair in zip(state.sinks, (k_sink, v_BG1V), strict=True)))
        )
    own_B1 = settings.own_position + slot_B[:, None]
    q_own, k_own = layer.rotate(k_BG1K[:, :1] if q_BH1K is None else q_BH1K, k_BG1K, own_B1)
    window = Window(put(state.window.k_BGNK, k_own), put(state.window.v_BGNV, v_BG1V))
    before = state.before
    if before:
        seen = layer.rotate_keys(k_BG1K, X + slot_B[:, None])
        before = before._replace(next_k_BGNK=put(before.next_k_BGNK, seen))
    a_BH1V = None
    if q_BH1K is not None:
        parts: list[Sequence[Tensor]] = []
        visible = []
        if state.sinks:
            parts.append(state.sinks)
            visible.append((segment_B >= depth)[:, None].expand(-1, X))
        if before:
            parts.append([before.k_BGNK, before.v_BGNV])
            visible.append((segment_B >= 1)[:, None].expand(-1, N))
        parts.append([x[:, :, :most] for x in window])
        visible.append(torch.arange(most, device=device) <= slot_B[:, None])
        a = _attend_parts(layer, q_own, parts, torch.cat(visible, 1)[:, None, None])[:, None]
        read = map_state(lambda x: x[:, None], before.memory if before else state.memory)
        first_B = segment_B < depth
        a_BH1V = layer.mix(a, q_BH1K[:, None], read, first_B.view(-1, 1, 1, 1, 1))[:, 0]
    pending = layer.add(k_BG1K, v_BG1V, state.memory, state.pending)
    state = state._replace(window=window, pending=pending, before=before)
    finished = [i for i, slot in enumerate(rows.slots) if slot + 1 == N]
    if finished:
        at = to_device(np.array(finished), device)
        state = place_rows(state, at, _next_segment(layer, select_rows(state, at)))
    return a_BH1V, state


def _attend_rows(
    layer: Layer, q: Tensor | None, k: Tensor, v: Tensor, state: LayerState, group: Group | SingleTokens, keep: bool
) -> tuple[Tensor | None, LayerState]:
    if isinstance(group, Group):
        return _attend_group(layer, q, k, v, state, group, keep)
    return _attend_single(layer, q, k, v, state, group, keep)


def attend(
    layer: Layer,
    q_BHTK: Tensor | None,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    state: LayerState | None,
    groups: list[Group | SingleTokens],
    keep: bool,
) -> tuple[Tensor | None, LayerState]:
    """A of Eq. 6 for all rows [B, H, T, V], 0 at padding, and the state after them.

    q None: only the state is wanted. state None: the rows have read nothing.
    """
    if state is None:
        state = empty_state(k_BGTK, v_BGTV, layer.settings, keep)
    if len(groups) == 1 and groups[0].everything:
        return _attend_rows(layer, q_BHTK, k_BGTK, v_BGTV, state, groups[0], keep)
    a_BHTV = None if q_BHTK is None else q_BHTK.new_zeros(*q_BHTK.shape[:-1], v_BGTV.shape[-1])
    for group in groups:
        at, columns = (to_device(np.array(x), k_BGTK.device) for x in (group.rows, group.columns))
        q, k, v = (None if x is None else x[at].index_select(2, columns) for x in (q_BHTK, k_BGTK, v_BGTV))
        a, part = _attend_rows(layer, q, k, v, select_rows(state, at), group, keep)  # type: ignore[arg-type]
        if keep:
            state = place_rows(state, at, part)
        if a_BHTV is not None and a is not None:
            rows = a_BHTV[at].index_copy(2, columns, a.to(a_BHTV.dtype))
            a_BHTV = a_BHTV.index_copy(0, at, rows)
    return a_BHTV, state


class InfiniGate(nn.Module):
    """The parameters that a layer learns for its memory, in float32.

    beta [H]: sigmoid(beta) is the weight of the memory, one a query head (Eq. 6). Two additions to the paper:
    decay [G], with settings.memory_decay: sigmoid(decay) is what remains of a key-value head's memory after a segment.
    input_weight [G, K] and input_bias [G], with settings.input_gate: see infini.nn.ops.memory.input_gate.

    It is a module, not bare parameters, so that peft's modules_to_save can name it. Casting the model leaves it in
    float32, because in bfloat16 rounding would remove an optimizer's steps.
    """

    def __init__(
        self, n_heads: int, n_kv_heads: int, d_key: int, settings: InfiniSettings, device: torch.device
    ) -> None:
        super().__init__()
        self.settings = settings
        self.watchers: dict[Projection, list[Keep]] = {"queries": [], "keys": []}
        """Functions that get the queries or keys [B, T, X] of every call of the layer, without positions."""
        self.beta = nn.Parameter(torch.empty(n_heads, dtype=torch.float32, device=device))
        if settings.memory_decay is not None:
            self.decay = nn.Parameter(torch.empty(n_kv_heads, dtype=torch.float32, device=device))
        if settings.input_gate:
            self.input_weight = nn.Parameter(torch.empty(n_kv_heads, d_key, dtype=torch.float32, device=device))
            self.input_bias = nn.Parameter(torch.empty(n_kv_heads, dtype=torch.float32, device=device))
        for parameter, value in self.initial():
            parameter.data.copy_(value)

    def initial(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter, with what it begins at."""
        values = [(self.beta, torch.full(self.beta.shape, float(self.settings.gate_init)))]
        if self.settings.memory_decay is not None:
            values.append((self.decay, ops.decay_logits(len(self.decay), self.settings.memory_decay).float()))
        if self.settings.input_gate:
            # All tokens alike. A common factor of all writes changes no read.
            values += [(each, torch.zeros(each.shape)) for each in (self.input_weight, self.input_bias)]
        return values

    def forward(self, like: Tensor, wanted: Wanted = "reads") -> Tensor:
        """The wanted values, on the device and in the dtype of `like`: for "reads" sigmoid(beta) [H, 1, 1], for
        "remains" sigmoid(decay) [1, 1, G], for "writes" the factors [B, S, G, N] of keys `like` [B, S, G, N, K].

        One method for all: hooks, as accelerate's that fetch weights, run before `forward` alone.
        """
        if wanted == "writes":
            weight, bias = (x.to(like.device, like.dtype) for x in (self.input_weight, self.input_bias))
            return ops.input_gate(like, weight, bias)
        if wanted == "remains":
            return torch.sigmoid(self.decay.to(like.device, like.dtype))[None, None]
        others = (parameter for name, parameter in self.named_parameters() if name != "beta")
        return ops.with_zero_gradients(torch.sigmoid(self.beta.to(like.device, like.dtype))[:, None, None], *others)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def kept(x: Tensor) -> Tensor:
            moved: Tensor = fn(x)
            narrow = moved.dtype in (torch.bfloat16, torch.float16)
            return x.to(moved.device) if narrow else moved

        return super()._apply(kept, recurse)


@torch.compiler.disable
def infini_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    infini: Call | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: query [B, H, T, K], key [B, G, T, K], value [B, G, T, V] ->
    [B, T, H, V]. Layers without a gate run their own kernel."""
    if not hasattr(module, "infini_gate"):
        stock = _kernel(module, module.infini_settings)
        return stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    if infini is None:
        raise RuntimeError("a layer with a memory was called outside of its model's forward")
    kinds = [name for name in (getattr(module, "layer_type", None), None) if name in infini.tables]
    cos_PR, sin_PR = (x.to(query.device) for x in infini.tables[kinds[0]])
    kernel_options = {"scaling": scaling, "dropout": dropout}
    kernel_options |= {name: options[name] for name in ("softcap",) if options.get(name) is not None}
    layer = Layer(module, module.infini_settings, cos_PR, sin_PR, kernel_options)
    index = module.layer_idx
    before = infini.states.get(index)
    infini.detached |= infini.again and not torch.is_grad_enabled()
    if infini.again and before is not None:
        # Reentrant checkpointing runs a layer first without gradients, where windows are written in place.
        before = map_state(torch.clone, before)
    for projection, x_BHTK in (("queries", query), ("keys", key)):
        for keep in module.infini_gate.watchers[projection]:
            keep(x_BHTK.transpose(1, 2).flatten(2))
    a, state = attend(layer, query, key, value, before, infini.groups, infini.keep)
    assert a is not None
    if infini.keep:
        infini.results[index] = state
    if infini.written is not None:
        infini.written[index] = (layer, key, value)
    return a.transpose(1, 2), None


def infini_mask(*args: Any, **options: Any) -> Any:
    """The mask function that transformers calls: the mask that stock layers need, or None. Layers with a memory use
    the plan, which is made from the model's attention_mask."""
    config = options["config"]
    sliding = options.get("local_size") is not None
    if ("sliding" if sliding else "full") not in kinds_without_memory(config):
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[config.infini["local_attention"]](*args, **options)


def kinds_without_memory(config: Any) -> set[str]:
    """The kinds of the layers without a memory: "sliding" or "full"."""
    types = layer_types(config)
    left = set(range(len(types))) - set(config.infini["layers"])
    return {"sliding" if types[i] == "sliding_attention" else "full" for i in left}


def heads_of(config: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, and d_key."""
    heads = config.num_attention_heads
    d_key = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, d_key


def layer_types(config: Any) -> list[str]:
    """The type of each layer: full_attention, sliding_attention, or another name of transformers."""
    return list(get_layer_types_and_kwargs(config)[0])


AttentionInterface.register(NAME, infini_attention)
AttentionMaskInterface.register(NAME, infini_mask)
