"""The compressive memory: Eq. 3 (retrieval), Eq. 4 (Linear update), Eq. 5 (Linear + Delta update), Eq. 6 (gate).

All segments of a call are computed at once: nothing inside a segment depends on its own update, so that only the state
(M, z) is carried from segment to segment. For Linear the state is a sum over the earlier segments. For Linear + Delta
z is such a sum too, and M follows the affine recurrence M_s = (I - A_s) M_{s-1} + B_s. All A_s and B_s are computed in
parallel. Both may decay, head by head, at the end of every segment, which is an addition to the paper.

Letters: B rows, S segments, N tokens a segment, H query heads, G key-value heads, K d_key, V d_value.
Products are taken in the dtype of their operands (bfloat16 under autocast), the state is float32 (float64 in float64).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from infini.nn.ops.dtypes import scaled, without_autocast
from infini.nn.state import state_class

UpdateRule = Literal["linear", "delta"]
DeltaNormaliser = Literal["previous", "current"]
InputGate = Literal["sigmoid"]
FirstSegment = Literal["local", "zero"]

# sigma(q) . z is positive, but can be far below 1 for tokens unlike any token in memory. It is clamped, never shifted:
# an added epsilon would distort these small values, and long contexts depend on them.
MIN_NORMALISER = 1e-30


@state_class
class Memory(NamedTuple):
    """The compressive memory of one layer.

    m_BGKV: [B, G, K, V] associative matrix M, the sum of sigma(k)^T v over past segments (Eq. 4), or by Delta (Eq. 5).
    z_BGK: [B, G, K] normaliser z, the sum of sigma(k) over past segments (Eq. 4).
    """

    m_BGKV: Tensor
    z_BGK: Tensor

    @property
    def is_a_sum(self) -> bool:
        """M and z are sums over tokens; see infini.nn.state.scale_memory."""
        return True


class Earlier(Protocol):
    """Segments of the same rows that precede the call's segments and that other processes read.

    Both methods return the state before the call's first segment. start: that state without the earlier segments; only
    the process that reads the first segments uses it. kept_SB: as for _RunningSum. See infini.nn.sequence_parallel.
    """

    def sums(self, added_BSX: Sequence[Tensor], start_BX: Sequence[Tensor], kept_SB: Tensor | None) -> list[Tensor]:
        """The states to which each segment adds added_BSX (Eq. 4)."""

    def affine(self, a_BSGKK: Tensor, b_BSGKV: Tensor, start_BGKV: Tensor, kept_SB: Tensor | None) -> Tensor:
        """The state M, which each segment changes to (I - A) M + B (Eq. 5)."""


class _Sigma(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # exp(min(x, 0)) + max(x, 0) is x + 1 above 0 and exp(x) below. One of the two terms is exact, so that there is
        # one rounding, in any dtype. Contiguous, because several products follow.
        y = x.clamp(max=0).exp_().add_(x.clamp(min=0)).contiguous()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y.clamp(max=1)


def sigma(x: Tensor) -> Tensor:
    """ELU + 1, elementwise: x + 1 for x > 0, exp(x) otherwise.

    elu(x) + 1 would be exactly 0 in float32 below about -17, and inexact well before.
    """
    return _Sigma.apply(x)


def retrieve(sq_BSGQK: Tensor, m_BSGKV: Tensor, z_BSGK: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator sigma(Q) M [B, S, G, Q, V] and denominator sigma(Q) z [B, S, G, Q, 1] (state dtype) of Eq. 3.

    The numerator has the dtype of sigma(Q), except for float16: M and its products exceed 65,504, the largest float16.
    """
    if sq_BSGQK.dtype == torch.float16:
        sq_BSGQK = sq_BSGQK.to(m_BSGKV.dtype)
    with without_autocast(m_BSGKV):
        numerator = sq_BSGQK @ m_BSGKV.to(sq_BSGQK.dtype)
    return numerator, normaliser(sq_BSGQK, z_BSGK)


def normaliser(s_BSGNK: Tensor, z_BSGK: Tensor) -> Tensor:
    """sigma(.) z of Eq. 3 and 5 in the state's dtype, clamped from below -> [B, S, G, N, 1]."""
    return _Normaliser.apply(s_BSGNK, z_BSGK).clamp(min=MIN_NORMALISER)


class _Quotient(torch.autograd.Function):
    """g / n of a normaliser n. g: broadcast to n.

    The gradient in n is computed as (gradient x g / n) / n, whose first factor has ordinary size. torch's own,
    g / n^2, overflows in float32 for n below 1e-19.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, n: Tensor) -> Tensor:
        ctx.save_for_backward(g, n)
        return g / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        g, n = ctx.saved_tensors
        return (grad / n).sum_to_size(g.shape), -(grad * (g / n)) / n


class _Normaliser(torch.autograd.Function):
    """s . z in the dtype of z, computed as a row times a matrix: a matrix times a column is several times slower on a
    CPU. The same holds for the gradients."""

    @staticmethod
    def forward(ctx: Any, s_BSGNK: Tensor, z_BSGK: Tensor) -> Tensor:
        ctx.save_for_backward(s_BSGNK, z_BSGK)
        with without_autocast(z_BSGK):
            return (z_BSGK[..., None, :] @ s_BSGNK.to(z_BSGK.dtype).transpose(-1, -2)).transpose(-1, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        s_BSGNK, z_BSGK = ctx.saved_tensors
        # The product is taken before rounding: in float16 a large z overflows and a small gradient is 0.
        g_s = (grad * z_BSGK[..., None, :]).to(s_BSGNK.dtype)
        with without_autocast(grad):
            g_z = (grad.transpose(-1, -2) @ s_BSGNK.to(z_BSGK.dtype))[..., 0, :]
        return g_s, g_z


class Sums(Protocol):
    """The sums over each segment's tokens that Eq. 4 and 5 need, from keys, values and write weights w (default: 1)."""

    def added(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """B = sum w sigma(k)^T v [B, S, G, K, V] and the normaliser's sum w sigma(k) [B, S, G, K]."""

    def erased(self, z_divisor_BSGK: Tensor, written_BSG: Tensor) -> Tensor:
        """A = sum w sigma(k)^T sigma(k) / (sigma(k) z) [B, S, G, K, K] of Linear + Delta, in the dtype of the state.

        z_divisor_BSGK: z. written_BSG: 1 where something is in memory, 0 elsewhere; there A is 0.
        """


class TokenSums:
    """The sums of sigma(k) [B, S, G, N, K], v [B, S, G, N, V] and w, broadcastable to [B, S, G, N], all segments and
    heads at once."""

    def __init__(self, sk_BSGNK: Tensor, v_BSGNV: Tensor, weight_BSGN: Tensor | None) -> None:
        if half := sk_BSGNK.dtype == torch.float16:
            # Sums over tokens and write weights exceed the largest float16.
            sk_BSGNK, v_BSGNV = sk_BSGNK.float(), v_BSGNV.float()
        self.products: Any = partial(without_autocast, sk_BSGNK) if half else nullcontext
        self.sk, self.v = sk_BSGNK, v_BSGNV
        self.written = sk_BSGNK if weight_BSGN is None else scaled(sk_BSGNK, weight_BSGN[..., None])

    def added(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See Sums."""
        with self.products():
            return (self.written.transpose(-1, -2) @ self.v).to(dtype), self.written.sum(-2, dtype=dtype)

    def erased(self, z_divisor_BSGK: Tensor, written_BSG: Tensor) -> Tensor:
        """See Sums."""
        share = _Quotient.apply(written_BSG[..., None, None], normaliser(self.sk, z_divisor_BSGK))
        with self.products():
            return (self.written.transpose(-1, -2) @ scaled(self.sk, share)).to(z_divisor_BSGK.dtype)


def decay_logits(heads: int, longest: float) -> Tensor:
    """[heads], float64: the initial logits of a learned decay (an addition to the paper).

    sigmoid of them is what remains of a head's memory after a segment. Half-lives are spread evenly in logarithm from 1
    to `longest` segments, so that heads forget at different speeds. A single head has `longest`.
    """
    shortest = math.log2(longest) if heads == 1 else 0.0
    half_lives = torch.logspace(shortest, math.log2(longest), heads, base=2, dtype=torch.float64)
    return torch.logit(0.5 ** (1 / half_lives))


MIN_GATE_LOGIT = -20.0
"""Lower bound of the logits of an input gate. Ten million tokens that are written with exp(-20) weigh as much as a
fiftieth of one token that is written with 1."""
MIN_KEY_NORM = 1e-12
"""Keys with a smaller |k| count as zeros in an input gate."""


def input_gate(k_BSGNK: Tensor, weight_GK: Tensor, bias_G: Tensor) -> Tensor:
    """The factor sigmoid(a . k / |k| + b) on what a token adds to the memory [B, S, G, N] (an addition to the paper).
    k: keys without positions, before sigma. a: weight_GK. b: bias_G.

    Keys are normalised because their size differs from model to model.
    """
    # A row times a matrix, as in _Normaliser.
    along_BSGN = (weight_GK[:, None] @ k_BSGNK.transpose(-1, -2))[..., 0, :]
    size_BSGN = torch.linalg.vector_norm(k_BSGNK, dim=-1)
    # A key of zeros has no direction: its logit is b, and it has no gradient, which would be divided by almost 0.
    empty_BSGN = size_BSGN < MIN_KEY_NORM
    cosine_BSGN = along_BSGN.masked_fill(empty_BSGN, 0.0) / size_BSGN.masked_fill(empty_BSGN, 1.0)
    return torch.sigmoid((cosine_BSGN + bias_G[:, None]).clamp(min=MIN_GATE_LOGIT))


def scan_sums(
    sums: Sums,
    memory: Memory,
    *,
    rule: UpdateRule,
    delta_normaliser: DeltaNormaliser = "previous",
    reset_BS: Tensor | None = None,
    earlier: Earlier | None = None,
    decay_BSG: Tensor | None = None,
) -> tuple[Memory, Memory]:
    """The memory each segment reads (M_{s-1}, z_{s-1}), stacked over S, and the memory after the last (Eq. 4, 5).

    sums: of all segments. reset_BS: the row's memory is cleared before the segment. delta_normaliser: Eq. 5 divides by
    sigma(K) z_{s-1} ("previous"); "current" divides by sigma(K) z_s, which bounds the spectral radius of A_s by 1 (an
    addition to the paper). earlier: segments between `memory` and the first segment of the call, read by other
    processes. Default: none. decay_BSG: broadcastable to [B, S, G], by which M and z of a head are multiplied at the
    end of a segment (an addition to the paper). Default: nothing decays.
    """
    dtype = memory.z_BGK.dtype
    b_BSGKV, dz_BSGK = sums.added(dtype)
    kept_SB = None if reset_BS is None else (~reset_BS).T.to(dtype)
    m_BGKV, z_BGK = memory.m_BGKV, memory.z_BGK
    if decay_BSG is None:
        if earlier is not None and rule == "linear":
            m_BGKV, z_BGK = earlier.sums((b_BSGKV, dz_BSGK), memory, kept_SB)
        elif earlier is not None:
            (z_BGK,) = earlier.sums((dz_BSGK,), (z_BGK,), kept_SB)
        z_read, z_last = _RunningSum.apply(dz_BSGK, z_BGK, kept_SB)
    else:
        decay_BSG = decay_BSG.to(dtype).expand(-1, dz_BSGK.shape[1], -1)
        z_read, z_last = (
            z[..., 0] for z in _affine_scan(None, dz_BSGK[..., None], z_BGK[..., None], kept_SB, decay_BSG, earlier)
        )
    if rule == "linear" and decay_BSG is None:
        m_read, m_last = _RunningSum.apply(b_BSGKV, m_BGKV, kept_SB)
    elif rule == "linear":
        m_read, m_last = _affine_scan(None, b_BSGKV, m_BGKV, kept_SB, decay_BSG, earlier)
    else:
        z_divisor = z_read if delta_normaliser == "previous" else z_read + dz_BSGK
        # An empty memory returns 0 / 0, which counts as 0: there is nothing to subtract.
        a_BSGKK = sums.erased(z_divisor, (z_read.sum(-1) > 0).to(dtype))
        m_read, m_last = _affine_scan(a_BSGKK, b_BSGKV, m_BGKV, kept_SB, decay_BSG, earlier)
    return Memory(m_read, z_read), Memory(m_last, z_last)


class _RunningSum(torch.autograd.Function):
    """x [B, S, ...] and the state before it -> the state each segment reads [B, S, ...], and the state after the last.

    kept_SB: 0 where the row is reset before that segment, 1 elsewhere. On a CPU a loop over segments is fastest. On
    other devices each operator is started by the host, so a few operators for all segments take its place where no row
    is reset: cumsum would carry a document that is not finite over a reset.
    """

    @staticmethod
    def forward(ctx: Any, x_BSX: Tensor, state_BX: Tensor, kept_SB: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.kept = kept_SB
        if _at_once(x_BSX, kept_SB):
            sums = torch.cat([state_BX[:, None], x_BSX], 1).cumsum(1)
            # A copy: the last state is carried on, and a view would keep those of all segments.
            return sums[:, :-1], sums[:, -1].clone()
        read = torch.empty_like(x_BSX)
        state = state_BX
        for s in range(x_BSX.shape[1]):
            read[:, s] = state if kept_SB is None else cleared(state, kept_SB[s])
            state = read[:, s] + x_BSX[:, s]
        return read, state

    @staticmethod
    def backward(ctx: Any, g_read: Tensor, g_last: Tensor) -> tuple[Tensor, Tensor, None]:
        if _at_once(g_read, ctx.kept):
            # The sums run from the last segment to the first: every later read contains the state before a segment.
            sums = torch.cat([g_last[:, None], g_read.flip(1)], 1).cumsum(1).flip(1)
            return sums[:, 1:], sums[:, 0], None
        g_x = torch.empty_like(g_read)
        g = g_last
        for s in range(g_read.shape[1] - 1, -1, -1):
            g_x[:, s] = g
            g = g + g_read[:, s]
            if ctx.kept is not None:
                g = cleared(g, ctx.kept[s])
        return g_x, g, None


def _at_once(x_BSX: Tensor, kept_SB: Tensor | None) -> bool:
    """Whether sums over segments are computed by operators over all segments, and not one after the other."""
    return kept_SB is None and x_BSX.device.type != "cpu"


def rows(kept_B: Tensor, like: Tensor) -> Tensor:
    """kept [B] with as many axes as `like` [B, ...]."""
    return kept_B.reshape(-1, *[1] * (like.dim() - 1))


def cleared(x_BX: Tensor, kept_B: Tensor) -> Tensor:
    """x with 0 in the rows where kept is 0. Not a product: a document that is not finite would reach the next one."""
    return x_BX.masked_fill(rows(kept_B, x_BX) == 0, 0)


def _affine_scan(
    a_BSGKK: Tensor | None,
    b_BSGKV: Tensor,
    m_BGKV: Tensor,
    kept_SB: Tensor | None,
    decay_BSG: Tensor | None,
    earlier: Earlier | None,
) -> tuple[Tensor, Tensor]:
    """M_s = decay (M_{s-1} - A_s M_{s-1} + B_s): the M each segment reads, and the last. Without A it is 0, without
    decay it is 1."""
    decay = None if decay_BSG is None else decay_BSG[..., None, None]
    if earlier is not None:
        a, b = a_BSGKK, b_BSGKV
        if decay is not None:
            # The same map as (I - A') M + B'.
            lost = (1 - decay) * torch.eye(b.shape[3], dtype=b.dtype, device=b.device)
            a = lost.expand(b.shape[0], *lost.shape[1:]) if a is None else lost + decay * a
            b = decay * b
        assert a is not None
        m_BGKV = earlier.affine(a, b, m_BGKV, kept_SB)
    read = []
    # The products of the recurrence have the state's dtype, also under autocast: their errors add up.
    with without_autocast(m_BGKV):
        for s, b in enumerate(b_BSGKV.unbind(1)):
            if kept_SB is not None:
                m_BGKV = cleared(m_BGKV, kept_SB[s])
            read.append(m_BGKV)
            m_BGKV = m_BGKV + b if a_BSGKK is None else m_BGKV - a_BSGKK[:, s] @ m_BGKV + b
            if decay is not None:
                m_BGKV = decay[:, s] * m_BGKV
    return torch.stack(read, 1), m_BGKV


def gate(
    a_dot: Tensor, numerator: Tensor, denominator: Tensor, g: Tensor, first: Tensor | None, first_segment: FirstSegment
) -> Tensor:
    """Eq. 6: A = sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot with A_mem = numerator / denominator.

    g: sigmoid(beta), the weight of the MEMORY, broadcastable to the denominator. first: true where the memory is empty
    and A_mem would be 0 / 0; there A = A_dot ("local") or A = (1 - sigmoid(beta)) A_dot ("zero").
    """
    g_mem, g_dot = gate_weights(g, first, first_segment)
    return _Mix.apply(a_dot, numerator, g_dot, _Quotient.apply(g_mem, denominator))


def with_zero_gradients(g: Tensor, *parameters: Tensor | None) -> Tensor:
    """g unchanged, but its backward pass gives each of the parameters a gradient of 0; None is passed over.

    In a text of one segment no output depends on a decay or an input gate, so their gradient would be None, and
    DistributedDataParallel raises an error.
    """
    if torch.is_grad_enabled():
        for parameter in parameters:
            g = g if parameter is None else g + 0 * parameter.sum().to(g.device, g.dtype)
    return g


def gate_weights(g: Tensor, first: Tensor | None, first_segment: FirstSegment) -> tuple[Tensor, Tensor]:
    """The weights of A_mem and A_dot in Eq. 6; see gate."""
    g_mem = g if first is None else g.masked_fill(first, 0.0)
    return g_mem, 1 - (g_mem if first_segment == "local" else g)


class _Mix(torch.autograd.Function):
    """a x + b y. The weights x and y have the state's dtype and at most one number per token and head."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, x, y)
        # Only the sum is rounded to a's dtype: x is a gate, and the error of rounding it would be the same for every
        # token.
        return (a * x).addcmul_(b, y).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        a, b, x, y = ctx.saved_tensors
        # The last axis is summed first: on a CPU that is faster than one sum over all broadcast axes.
        g_x, g_y = (
            (grad * part).sum(-1, keepdim=True, dtype=weight.dtype).sum_to_size(weight.shape)
            for part, weight in ((a, x), (b, y))
        )
        return (grad * x).to(a.dtype), (grad * y).to(b.dtype), g_x, g_y
