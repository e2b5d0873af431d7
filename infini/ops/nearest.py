"""The keys of a long memory that score highest for each query: exact, in blocks, or by an approximate index.

Letters: B rows, S segments, Q query tokens a segment, L keys, H query heads, G key-value heads, K d_key, R keys found.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from infini.errors import InputError

Search = Literal["exact", "approximate"]
BLOCK = 1024
"""Keys that are scored at a time: the full matrix of scores never exists."""
CELLS_EACH = 64
"""Keys to a cell of the approximate index, about; an eighth of the cells is searched."""


@torch.no_grad()
def nearest(
    q_BSQHK: torch.Tensor, k_BLGK: torch.Tensor, low_BS: torch.Tensor, high_S: torch.Tensor, n: int, search: Search
) -> torch.Tensor:
    """Indices [B, S, Q, H, R] of the R = min(n, L) keys with the highest q k among those in [low, high) of a segment;
    -1 where there are fewer.

    "approximate" needs the package faiss. Raises InputError without it.
    """
    n = min(n, k_BLGK.shape[1])
    find = _exact if search == "exact" else _approximate
    return find(q_BSQHK.float() if q_BSQHK.dtype == torch.bfloat16 else q_BSQHK, k_BLGK, low_BS, high_S, n)


def _exact(
    q_BSQHK: torch.Tensor, k_BLGK: torch.Tensor, low_BS: torch.Tensor, high_S: torch.Tensor, n: int
) -> torch.Tensor:
    B, S, Q, H, _ = q_BSQHK.shape
    L, G = k_BLGK.shape[1:3]
    q = q_BSQHK.unflatten(3, (G, H // G)).permute(0, 3, 1, 2, 4, 5).flatten(2, 4)
    best = torch.full((B, S, Q, H, n), -math.inf, dtype=q.dtype, device=q.device)
    found = torch.full(best.shape, -1, dtype=torch.long, device=q.device)
    begin, end = int(low_BS.min()), int(high_S.max())
    for start in range(begin, min(end, L), BLOCK):
        stop = min(start + BLOCK, end, L)
        keys = k_BLGK[:, start:stop].to(q.dtype).permute(0, 2, 3, 1)
        scores = (q @ keys).unflatten(2, (S, Q, H // G)).permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
        place = torch.arange(start, stop, device=q.device)
        allowed = (place >= low_BS[..., None]) & (place < high_S[:, None])
        scores = scores.masked_fill(~allowed[:, :, None, None], -math.inf)
        best, order = torch.cat([best, scores], -1).topk(n, -1)
        new = (start + order - n).where(order >= n, found.gather(-1, order.clamp(max=n - 1)))
        found = new.masked_fill(best == -math.inf, -1)
    return found


def _approximate(
    q_BSQHK: torch.Tensor, k_BLGK: torch.Tensor, low_BS: torch.Tensor, high_S: torch.Tensor, n: int
) -> torch.Tensor:
    try:
        import faiss
    except ImportError as error:
        raise InputError("model.search='approximate': needs the package faiss-cpu; or take exact") from error
    B, S, Q, H, K = q_BSQHK.shape
    L, G = k_BLGK.shape[1:3]
    found = torch.full((B, S, Q, H, n), -1, dtype=torch.long)
    q, k = q_BSQHK.detach().float().cpu(), k_BLGK.detach().float().cpu()
    cells = max(1, L // CELLS_EACH)
    for row in range(B):
        begin = int(low_BS[row].min())
        if begin >= int(high_S.max()):
            continue
        for g in range(G):
            keys = k[row, begin:, g].contiguous().numpy()
            index = faiss.IndexIVFFlat(faiss.IndexFlatIP(K), K, min(cells, len(keys)), faiss.METRIC_INNER_PRODUCT)
            index.cp.min_points_per_centroid = 1
            index.train(keys)
            index.add(keys)
            heads = slice(g * (H // G), (g + 1) * (H // G))
            for s in range(S):
                low, high = int(low_BS[row, s]) - begin, int(high_S[s]) - begin
                if high <= low:
                    continue
                asked = q[row, s, :, heads].flatten(0, 1).contiguous().numpy()
                within = faiss.SearchParametersIVF(
                    sel=faiss.IDSelectorRange(low, high), nprobe=max(1, index.nlist // 8)
                )
                places = torch.from_numpy(index.search(asked, n, params=within)[1])
                found[row, s, :, heads] = torch.where(places >= 0, places + begin, -1).view(Q, H // G, n)
    return found.to(q_BSQHK.device)
