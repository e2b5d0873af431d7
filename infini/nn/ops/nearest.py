"""Search for the keys of a long memory with the highest scores: exact, in blocks, or with an approximate index.

Letters: B rows, S segments, Q query tokens a segment, L keys, H query heads, G key-value heads, K d_key, R keys found.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from infini.errors import InputError
from infini.nn.host import to_device, to_numpy

Search = Literal["exact", "approximate"]
BLOCK = 1024
"""Keys that are scored at a time, at least."""
SCORES = 1 << 24
"""Scores that exist at a time, 64 MB: never the full matrix of a long memory."""
SEGMENTS_PER_BATCH = 8
"""Segments that are searched together: each scores every key that any of them may see."""
MIN_PACKED_SCORES = 1 << 18
"""Number of scores from which selecting among packed integers is faster."""
KEYS_PER_CELL = 64
"""Keys per cell of the approximate index, about. An eighth of the cells is searched. Up to BLOCK keys are searched
exactly."""


@torch.no_grad()
def nearest(q_BSQHK: Tensor, k_BLGK: Tensor, low_BS: Tensor, high_S: Tensor, n: int, search: Search) -> Tensor:
    """Indices [B, S, Q, H, R] of the R = min(n, L) keys with the highest q k among those in [low, high) of a segment;
    -1 where there are fewer. low_BS and high_S are best on the host: they are read.

    "approximate" needs the package faiss. Raises InputError without it.
    """
    n = min(n, k_BLGK.shape[1])
    q_BSQHK = q_BSQHK.float() if q_BSQHK.dtype == torch.bfloat16 else q_BSQHK
    if search == "approximate":
        return _approximate(q_BSQHK, k_BLGK, low_BS, high_S, n)
    # Neighbouring segments see nearly the same keys; distant ones do not.
    near = zip(
        *(x.split(SEGMENTS_PER_BATCH, -1) for x in (low_BS, high_S)), q_BSQHK.split(SEGMENTS_PER_BATCH, 1), strict=True
    )
    return torch.cat([_exact(q, k_BLGK, low, high, n) for low, high, q in near], 1)


def _exact(q_BSQHK: Tensor, k_BLGK: Tensor, low_BS: Tensor, high_S: Tensor, n: int) -> Tensor:
    B, S, Q, H, _ = q_BSQHK.shape
    L, G = k_BLGK.shape[1:3]
    # Scores keep the layout of the product: they are by far the largest tensor, and a copy would take most of the time.
    q = q_BSQHK.unflatten(3, (G, H // G)).permute(0, 3, 1, 2, 4, 5).flatten(2, 4)
    best = torch.full((B, G, S, Q * (H // G), 0), -math.inf, dtype=q.dtype, device=q.device)
    found = torch.full(best.shape, -1, dtype=torch.long, device=q.device)
    begin, end = int(to_numpy(low_BS).min(initial=L)), min(int(to_numpy(high_S).max(initial=0)), L)
    low_BS, high_S = to_device(low_BS, q.device), to_device(high_S, q.device)
    block = max(BLOCK, SCORES // max(1, B * S * Q * H))
    for start in range(begin, end, block):
        stop = min(start + block, end)
        keys = k_BLGK[:, start:stop].to(q.dtype).permute(0, 2, 3, 1)
        scores = (q @ keys).unflatten(2, (S, -1))
        place = torch.arange(start, stop, device=q.device)
        allowed = (place >= low_BS[..., None]) & (place < high_S[:, None])
        scores.masked_fill_(~allowed[:, None, :, None], -math.inf)
        kept = best.shape[-1]
        candidates = torch.cat([best, scores], -1) if kept else scores
        best, order = _highest(candidates, min(n, kept + stop - start))
        new = start + order - kept
        if kept:
            new = new.where(order >= kept, found.gather(-1, order.clamp(max=kept - 1)))
        found = new.masked_fill(best == -math.inf, -1)
    found = F.pad(found, (0, n - found.shape[-1]), value=-1)
    return found.unflatten(3, (Q, H // G)).permute(0, 2, 3, 1, 4, 5).flatten(3, 4)


def _highest(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n highest scores of each row and their places, unordered."""
    length = scores.shape[-1]
    fast = scores.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not fast or scores.dtype != torch.bfloat16 or not n < length <= 1 << 16 or scores.numel() < MIN_PACKED_SCORES:
        best = scores.topk(n, -1, sorted=False)
        return best.values, best.indices
    # Score and place in one integer, with the order of the scores: numpy selects among integers with the CPU's widest
    # instructions, in a third of the time that torch takes for pairs (results/LOG.md 143).
    packed = scores.view(torch.int16).to(torch.int32)
    packed ^= (packed >> 31) & 0x7FFF
    packed.mul_(1 << 16).add_(torch.arange(length, dtype=torch.int32))
    packed.numpy().partition(length - n, axis=-1)
    order = (packed[..., length - n :] & 0xFFFF).long()
    return scores.gather(-1, order), order


def _approximate(q_BSQHK: Tensor, k_BLGK: Tensor, low_BS: Tensor, high_S: Tensor, n: int) -> Tensor:
    """Search with one index per segment, of the keys that it may see. An index of the whole line would contain later
    keys, and its results would depend on how a document is cut into calls."""
    faiss = import_faiss()
    B, S, Q, H, _ = q_BSQHK.shape
    L, G = k_BLGK.shape[1:3]
    found = torch.full((B, S, Q, H, n), -1, dtype=torch.long, device=q_BSQHK.device)
    lows, highs = low_BS.tolist(), high_S.tolist()
    for row in range(B):
        for s in range(S):
            low, high = lows[row][s], min(highs[s], L)
            if high - low <= BLOCK:
                one = slice(row, row + 1), slice(s, s + 1)
                found[one] = _exact(q_BSQHK[one], k_BLGK[one[0]], low_BS[one], high_S[one[1]], n)
                continue
            for g in range(G):
                heads = slice(g * (H // G), (g + 1) * (H // G))
                keys = k_BLGK[row, low:high, g].detach().float().cpu().contiguous()
                asked = q_BSQHK[row, s, :, heads].detach().float().cpu().flatten(0, 1).contiguous()
                places = torch.from_numpy(_by_cells(faiss, keys, asked.numpy(), n))
                places = torch.where(places < 0, -1, places + low)
                found[row, s, :, heads] = places.view(Q, H // G, n).to(found.device)
    return found


def import_faiss() -> Any:
    """The package faiss. Raises InputError if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise InputError("model.search='approximate': needs the package faiss-cpu; or take exact") from error
    return faiss


def _by_cells(faiss: Any, keys_LK: Tensor, asked: Any, n: int) -> Any:
    """Indices of n keys for each query, from the cells whose centres score highest. The centres are equally spaced
    keys: k-means would take longer than the search that the index saves."""
    centres = torch.nn.functional.normalize(keys_LK.flip(0)[::KEYS_PER_CELL], dim=-1)
    cells = faiss.IndexFlatIP(keys_LK.shape[1])
    cells.add(centres.contiguous().numpy())
    index = faiss.IndexIVFFlat(cells, keys_LK.shape[1], len(centres), faiss.METRIC_INNER_PRODUCT)
    index.is_trained = True
    index.add(keys_LK.numpy())
    index.nprobe = -(-len(centres) // 8)
    places = index.search(asked, n)[1]
    short = (places < 0).any(1)
    if short.any():
        # The searched cells have fewer than n keys: these queries search all cells.
        index.nprobe = len(centres)
        places[short] = index.search(asked[short], n)[1]
    return places
