"""Unlimiformer: an encoder-decoder that encodes an input of any length in windows. In every layer and head its decoder
attends to the k encoder states with the highest scores.

Bertsch et al., "Unlimiformer: Long-Range Transformers with Unlimited Length Input". A score q . (W h + b) is
(W^T q) . h + q . b, and q . b is the same for all states h. One index of the states h, searched with W^T q, therefore
serves all heads of all layers. Weights are unchanged. If k is at least the number of states, the result is full
cross-attention.

Letters: B rows, T decoder tokens, S encoder states, D their width, H heads, K size of a head, R retrieved states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from infini.errors import one_of
from infini.nn.host import to_numpy
from infini.nn.ops.nearest import import_faiss
from infini.system.progress import progress_bar

SEARCHES = ("exact", "approximate")
STATES_PER_CALL = 1 << 14
"""Encoder states added to an index at a time."""
SCORES_PER_CALL = 1 << 24
"""Scores that exist at the same time, for few queries and many states."""


class Window(NamedTuple):
    """A window [start, stop) of the input, and the part [keep_start, keep_stop) whose states are kept."""

    start: int
    stop: int
    keep_start: int
    keep_stop: int


def windows(n_tokens: int, size: int) -> list[Window]:
    """Windows that overlap by half. The middle half of each is kept; the first window also keeps its beginning, and the
    last, which ends with the input, its end. Every token is kept once. size: even, at least 2."""
    if size < 2 or size % 2:
        raise ValueError(f"size={size}: must be even and at least 2")
    if n_tokens <= size:
        return [Window(0, n_tokens, 0, n_tokens)]
    starts = list(range(0, n_tokens - size, size // 2))
    # The last window has the full size and ends with the input.
    starts.append(n_tokens - size)
    kept = 0
    found = []
    for index, start in enumerate(starts):
        last = index == len(starts) - 1
        keep_stop = n_tokens if last else start + size // 2 + size // 4
        found.append(Window(start, start + size, kept, keep_stop))
        kept = keep_stop
    return found


def encode(
    encoder: Callable[..., Any],
    ids_BS: Tensor,
    size: int,
    global_first: bool = False,
    advance: Callable[[int], None] = lambda tokens: None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Encoder states [B, S, D] of an input of any length, each from the window that keeps it; 0 after a row's end.

    encoder: of a transformers model. global_first: whether the first token of every window has global attention (LED).
    advance: called with the number of new states after each window. attention_mask: [B, S], 0 at padding.
    """
    n_tokens = ids_BS.shape[1]
    if n_tokens > size and attention_mask is not None:
        # A row has the same windows alone and in a batch. So rows of each length are encoded separately, and all rows
        # that fit one window together.
        lengths = np.maximum(to_numpy(attention_mask).sum(1), size)
        if lengths.min() < n_tokens:
            found = []
            for length in np.unique(lengths).tolist():
                of_rows = np.flatnonzero(lengths == length).tolist(), slice(length)
                made = encode(encoder, ids_BS[of_rows], size, global_first, advance, attention_mask[of_rows])
                found.append(nn.functional.pad(made, (0, 0, 0, n_tokens - length)))
            return torch.cat(found)[lengths.argsort(kind="stable").argsort().tolist()]
    states = []
    for window in windows(n_tokens, size):
        here = slice(window.start, window.stop)
        given = {}
        if attention_mask is not None:
            # A short input in a batch can have windows of padding only, for which LED's gradients are NaN. The first
            # token of such a window is therefore unmasked; the mask of the states hides it.
            given["attention_mask"] = mask_BT = attention_mask[:, here].clone()
            mask_BT[~mask_BT.bool().any(1), 0] = 1
        if global_first:
            given["global_attention_mask"] = torch.zeros_like(ids_BS[:, here])
            given["global_attention_mask"][:, 0] = 1
        made = encoder(input_ids=ids_BS[:, here], **given).last_hidden_state
        states.append(made[:, window.keep_start - window.start : window.keep_stop - window.start])
        advance(window.keep_stop - window.keep_start)
    return torch.cat(states, 1)


class StateIndex:
    """An approximate index (faiss, HNSW by inner product) of the encoder states of the last search, one per row. All
    layers of a model share it.

    It holds the states minus their mean. The mean adds the same number to all scores of a query, and a large one would
    hide the differences between states from the search.
    """

    def __init__(self) -> None:
        self._states: Tensor | None = None
        self._counts: Tensor | None = None
        self._rows: list[tuple[Any, Tensor]] = []

    def nearest(self, states_BSD: Tensor, queries_BQD: Tensor, k: int, counts_BS: Tensor | None = None) -> Tensor:
        """Indices [B, Q, k] of the states with approximately the largest inner products, -1 if there are fewer.

        counts_BS: which states may be found; None: all.
        """
        # A reference to the tensor keeps its memory from being used by another.
        if self._states is not states_BSD or not _same(self._counts, counts_BS):
            everything_S = torch.ones(states_BSD.shape[1], dtype=torch.bool)
            self._rows = []
            for row, rows_SD in enumerate(states_BSD):
                places_R = (everything_S if counts_BS is None else counts_BS[row].cpu()).nonzero()[:, 0]
                self._rows.append((_hnsw(rows_SD[places_R.to(rows_SD.device)]), places_R))
            self._states, self._counts = states_BSD, counts_BS
        found = []
        for (index, places_R), queries_QD in zip(self._rows, queries_BQD, strict=True):
            # The search must visit more states than it returns.
            index.hnsw.efSearch = max(128, 2 * k)
            best_QR = torch.from_numpy(index.search(queries_QD.detach().float().cpu().numpy(), k)[1])
            found.append(torch.where(best_QR < 0, -1, places_R[best_QR.clamp(min=0)]))
        return torch.stack(found).to(states_BSD.device)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _hnsw(states_SD: Tensor) -> Any:
    faiss = import_faiss()
    states_SD = states_SD.detach().float().cpu()
    states_SD = states_SD - states_SD.mean(0)
    index = faiss.IndexHNSWFlat(states_SD.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 80
    with progress_bar("making the index of encoder states", len(states_SD), shown=False) as advance:
        for part_RD in states_SD.split(STATES_PER_CALL):
            index.add(part_RD.numpy())
            advance(len(part_RD))
    return index


class UnlimiformerAttention(nn.Module):
    """The cross-attention of one decoder layer. Each head attends to the `k` states with the highest scores.

    base: the layer's own cross-attention. Its projections keep their names, so that checkpoints of the model stay
    valid. index: for an approximate search, for one token at a time; None: exact search. results: number of values that
    the layer expects. in_training: whether to use the best k states in training too, instead of all.
    """

    def __init__(
        self, base: Any, k: int, index: StateIndex | None = None, results: int = 2, in_training: bool = True
    ) -> None:
        super().__init__()
        # A tuple is not registered as a submodule: the base's projections are this module's.
        self._plain, self.in_training = (base,), in_training
        self.k, self.index, self.results = k, index, results
        self.dropout: float = base.dropout
        self.num_heads, self.head_dim, self.scaling = base.num_heads, base.head_dim, base.scaling
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = base.q_proj, base.k_proj, base.v_proj, base.out_proj

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Hidden states [B, T, D] of the decoder and all encoder states [B, S, D] -> [B, T, D]; no cache is needed."""
        if self.training and not self.in_training:
            (plain,) = self._plain
            given = {"past_key_values": past_key_values, "attention_mask": attention_mask, **kwargs}
            return plain.train()(hidden_states, key_value_states=key_value_states, **given)
        heads = (self.num_heads, self.head_dim)
        q_BHTK = self.q_proj(hidden_states).unflatten(-1, heads).transpose(1, 2) * self.scaling
        weight_HKD = self.k_proj.weight.unflatten(0, heads)
        # Queries of the states themselves. q . b shifts all scores equally, and does not change the softmax.
        asking_BHTD = torch.einsum("bhtk,hkd->bhtd", q_BHTK, weight_HKD)
        mask_BTS = _additive(attention_mask, asking_BHTD.dtype)
        S = key_value_states.shape[1]
        # For many tokens the scores of all states take less memory than the best states, one set per token and head.
        if self.k >= S or hidden_states.shape[1] > 1:
            read_BHTD, total_BHT1 = self._over_all(asking_BHTD, key_value_states, mask_BTS)
        else:
            # In decoding there is no dropout: weights sum to 1.
            read_BHTD, total_BHT1 = self._over_best(asking_BHTD, key_value_states, mask_BTS), None
        # The value projection follows the weighted mean. Its bias is multiplied by the sum of the weights.
        value_HKD = self.v_proj.weight.unflatten(0, heads)
        o_BTHK = torch.einsum("bhtd,hkd->bthk", read_BHTD, value_HKD)
        if self.v_proj.bias is not None:
            bias_HK = self.v_proj.bias.unflatten(0, heads)
            o_BTHK = o_BTHK + (bias_HK if total_BHT1 is None else bias_HK * total_BHT1.transpose(1, 2))
        out = self.out_proj(o_BTHK.flatten(-2))
        return (out, None, past_key_values)[: self.results]

    def _over_all(
        self, asking_BHTD: Tensor, states_BSD: Tensor, mask_BTS: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Weighted mean of the best k states, from the scores of all states: for training, with many queries and few
        states. Also the sum of the weights if dropout changes it from 1, otherwise None.
        """
        scores = torch.einsum("bhtd,bsd->bhts", asking_BHTD, states_BSD)
        if mask_BTS is not None:
            scores = scores + mask_BTS[:, None]
        if self.k < scores.shape[-1]:
            scores = scores.masked_fill(scores < _kth_largest(scores, self.k), -torch.inf)
        weights, total = scores.softmax(-1), None
        if self.training and self.dropout:
            weights = nn.functional.dropout(weights, self.dropout)
            total = weights.sum(-1, keepdim=True)
        return torch.einsum("bhts,bsd->bhtd", weights, states_BSD), total

    def _over_best(self, asking_BHTD: Tensor, states_BSD: Tensor, mask_BTS: Tensor | None) -> Tensor:
        """The same for few queries and many states: a search finds the best states, and only these are gathered."""
        B, H, T, D = asking_BHTD.shape
        if self.index is None:
            best_BHTR = self._best(asking_BHTD, states_BSD, mask_BTS)
        else:
            counts_BS = None if mask_BTS is None else mask_BTS[:, 0] == 0
            best_BQR = self.index.nearest(states_BSD, asking_BHTD.flatten(1, 2), self.k, counts_BS)
            best_BHTR = best_BQR.unflatten(1, (H, T))
        none_BHTR = best_BHTR < 0
        best_BHTR = best_BHTR.clamp(min=0)
        # index_select copies whole states at a time, unlike indexing by row and place.
        rows = zip(states_BSD, best_BHTR, strict=True)
        found_BHTRD = torch.stack([states.index_select(0, best.flatten()) for states, best in rows])
        found_BHTRD = found_BHTRD.view(B, H, T, -1, D)
        scores = torch.einsum("bhtd,bhtrd->bhtr", asking_BHTD, found_BHTRD).masked_fill(none_BHTR, -torch.inf)
        if mask_BTS is not None:
            scores = scores + mask_BTS[:, None].expand(B, H, T, -1).gather(-1, best_BHTR)
        return torch.einsum("bhtr,bhtrd->bhtd", scores.softmax(-1), found_BHTRD)

    def _best(self, asking_BHTD: Tensor, states_BSD: Tensor, mask_BTS: Tensor | None) -> Tensor:
        """Indices [B, H, T, k] of the states with the largest scores, computed for a part of the states at a time."""
        B, H, T, _ = asking_BHTD.shape
        size = max(1, SCORES_PER_CALL // (B * H * T))
        best_scores = best = None
        # Scores have the states' dtype: autocast would copy all states to bfloat16 for every token and layer.
        with torch.no_grad(), torch.autocast(states_BSD.device.type, enabled=False):
            asking_BQD = asking_BHTD.to(states_BSD.dtype).flatten(1, 2)
            for start in range(0, states_BSD.shape[1], size):
                part_BSD = states_BSD[:, start : start + size]
                # Row by row: on a CPU a batched product of few queries and many states takes twice as long.
                found = [states_SD @ asking_QD.T for states_SD, asking_QD in zip(part_BSD, asking_BQD, strict=True)]
                scores = torch.stack(found).transpose(1, 2).unflatten(1, (H, T))
                if mask_BTS is not None:
                    scores = scores + mask_BTS[:, None, :, start : start + size]
                index = torch.arange(start, start + part_BSD.shape[1], device=scores.device).expand(scores.shape)
                if best is not None and best_scores is not None:
                    scores, index = torch.cat([best_scores, scores], -1), torch.cat([best, index], -1)
                best_scores, places = scores.topk(min(self.k, scores.shape[-1]), -1, sorted=False)
                best = index.gather(-1, places)
        assert best is not None
        return best


def _kth_largest(scores: Tensor, k: int) -> Tensor:
    """The k-th largest of the last axis, [..., 1], without gradient."""
    scores = scores.detach()
    if scores.device.type != "cpu":
        return scores.topk(k, -1).values[..., -1:]
    # Many times faster than topk on a CPU; numpy has no bfloat16.
    wide = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    place = scores.shape[-1] - k
    found = np.partition(wide.numpy(), place, -1)[..., place : place + 1]
    return torch.from_numpy(found).to(scores.dtype)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask [B, 1, T, S] of transformers, true or 0 at visible states, as numbers [B, T, S] to add to scores."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)[:, 0]
    return mask[:, 0].to(dtype)


def extend(model: Any, k: int, search: str = "exact", in_training: bool = True) -> Any:
    """Replace every cross-attention of an encoder-decoder of transformers (BART, LED) by UnlimiformerAttention.

    The model is changed in place and returned; its weights and their names are unchanged. search: "exact", or
    "approximate" for single tokens, with one index for all layers and heads. in_training: whether to use the best k
    states in training too. Raises ValueError (an InputError) for another search, for k below 1, and for a model without
    cross-attention.
    """
    one_of("search", search, SEARCHES)
    if k < 1:
        raise ValueError(f"k={k}: must be at least 1")
    layers = getattr(model.get_decoder(), "layers", None) if hasattr(model, "get_decoder") else None
    if layers is None or not all(hasattr(layer, "encoder_attn") for layer in layers):
        raise ValueError(f"{type(model).__name__}: no encoder-decoder with cross-attention")
    index = StateIndex() if search == "approximate" else None
    for layer in layers:
        base = layer.encoder_attn
        # LED's layers expect the cache back, BART's do not.
        results = getattr(base, "results", 3 if type(base).__name__.startswith("LED") else 2)
        layer.encoder_attn = UnlimiformerAttention(base, k, index, results, in_training)
    return model
