"""The cache of an injected model, whose size does not depend on the length of the document.

`generate()` and `model(..., use_cache=True)` make one. A book is read once and asked many times:

    cache = InfiniCache(model.config)
    model.generate(book, past_key_values=cache, max_new_tokens=1)
    cache.save("book.safetensors")
    cache = InfiniCache.load("book.safetensors", model)
    model.generate(**cache.inputs(question), max_new_tokens=100)     # on a fork: the cache stays as it was
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    get_layer_types_and_kwargs,
)

from infini.errors import InputError
from infini.nn.state import detach, filled, fork, map_state, move, select_rows, state_bytes, stored_leaves
from infini.nn.tensor_file import read_tensors, write_tensors
from infini.pretrained.llm.attention import Call, Layer, LayerState, attend, empty_state, heads_of
from infini.pretrained.llm.plan import Columns, group_rows, real_columns
from infini.pretrained.llm.settings import InfiniSettings, settings_of

ROLLBACK = 1024
"""Columns that `crop` can always take back while past recording is on (assisted decoding drafts a few dozen)."""
FORMAT = "infini-cache-1"


def _keep_window(layer: Any, more: int = 0) -> None:
    """Cut what a sliding layer kept for `crop` to its window and ROLLBACK columns before it."""
    if layer.is_sliding and layer.is_initialized:
        kept = layer.sliding_window - 1 + more
        layer.keys, layer.values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]


class InfiniLayer(CacheLayerMixin):
    """One layer with a memory; its state is written by the model's attention, never by `update`."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: LayerState | None = None
        self.columns = 0
        self.record_past = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise InputError("an InfiniCache is written by an injected model: use model.generate or model.forward")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Always an error: the keys and values of this layer are not a growing list."""
        self.lazy_initialization(key_states, value_states)

    def get_seq_length(self) -> int:
        """Columns read so far, padding included: what `generate` counts."""
        return self.columns

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns with the next call's, 0)."""
        return self.columns + query_length, 0

    def map(self, function: Callable[[Any], Any]) -> None:
        """Replace the state by function(state), if there is a state."""
        if self.state is not None:
            self.state = function(self.state)

    def activate_past_recording(self) -> None:
        """See InfiniCache."""
        self.record_past = True

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.columns, self.is_initialized = None, 0, False

    def offload(self) -> None:
        """Not needed: the state is small."""

    def prefetch(self) -> None:
        """Not needed: the state is small."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The rows named, in that order."""
        self.map(lambda state: select_rows(state, beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows named, by index or by a mask."""
        self.map(lambda state: select_rows(state, indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, with the copies next to each other."""
        self.map(lambda state: map_state(lambda leaf: leaf.repeat_interleave(repeats, 0), state))

    def crop(self, tokens_to_remove: int) -> None:
        """InfiniCache.crop does it for all layers with a memory at once."""


def stock_layer(k_BGCK: Tensor, v_BGCV: Tensor) -> DynamicLayer:
    """A cache layer of transformers that holds these keys and values."""
    layer = DynamicLayer()
    layer.lazy_initialization(k_BGCK, v_BGCV)
    layer.keys, layer.values = k_BGCK, v_BGCV
    return layer


@dataclass
class _Written:
    """One call's keys and values, of every layer with a memory, in the order of the call."""

    columns: int
    mask_BT: Tensor | None
    layers: dict[int, tuple[Layer, Tensor, Tensor]]

    def split(self, columns: int) -> tuple[_Written, _Written]:
        def cut(span: slice) -> _Written:
            # Copies, so that what is given up is freed.
            mask = None if self.mask_BT is None else self.mask_BT[:, span]
            layers = {
                i: (layer, k[:, :, span].clone(), v[:, :, span].clone()) for i, (layer, k, v) in self.layers.items()
            }
            length = len(range(self.columns)[span])
            return _Written(length, mask, layers)

        return cut(slice(None, columns)), cut(slice(columns, None))


@dataclass
class _Past:
    """The state at the last crop, and what was written since."""

    states: dict[int, LayerState | None]
    lengths: list[int]
    leads: list[int]
    columns: int
    calls: list[_Written] = field(default_factory=list)

    @property
    def recorded(self) -> int:
        return sum(call.columns for call in self.calls)

    def nbytes(self) -> int:
        """Bytes of the states, keys and values."""
        calls = sum(k.nbytes + v.nbytes for call in self.calls for _, k, v in call.layers.values())
        return calls + sum(state_bytes(state) for state in self.states.values())

    def advance(self, columns: int, settings: InfiniSettings) -> None:
        """Write the oldest `columns` recorded columns into the state."""
        while columns:
            call = self.calls.pop(0)
            if call.columns > columns:
                call, rest = call.split(columns)
                self.calls.insert(0, rest)
            columns_B = real_columns(call.mask_BT, len(self.lengths), call.columns)
            N, depth = settings.segment_length, settings.depth
            groups = group_rows(self.lengths, columns_B, call.columns, N, depth)
            with torch.no_grad():
                for i, (layer, k, v) in call.layers.items():
                    self.states[i] = attend(layer, None, k, v, self.states[i], groups, keep=True)[1]
            self.lengths, self.leads = _counted(self.lengths, self.leads, columns_B, call.columns)
            self.columns += call.columns
            columns -= call.columns


def _counted(
    lengths: list[int], leads: list[int], columns_B: list[Columns], columns: int
) -> tuple[list[int], list[int]]:
    """(real tokens, columns of padding before the first) of each row after a call."""
    leads = [
        lead if length else lead + (real[0] if real else columns)
        for length, lead, real in zip(lengths, leads, columns_B, strict=True)
    ]
    return [length + len(real) for length, real in zip(lengths, columns_B, strict=True)], leads


class InfiniCache(Cache):
    """The cache of an injected model: for layers with a memory a state of fixed size, for others the base's own cache.

    config: of the model, or the model. A layer's state is the window of the unfinished segment, M and z (and what the
    options `window=previous` and `sinks` keep). Where all layers have a memory, or the others slide, the bytes do not
    grow with the document.
    """

    layers: list[Any]
    _is_user_defined: bool
    """Set by generate() where the user passed the cache."""

    def __init__(self, config: Any) -> None:
        config = getattr(config, "config", config)
        self.settings = settings_of(config)
        self.model_type: str = config.model_type
        self._heads = heads_of(config)[1:]
        types, options = get_layer_types_and_kwargs(config)
        super().__init__(
            layers=[
                InfiniLayer() if i in self.settings.layers else DYNAMIC_LAYER_TYPE_MAPPING[kind](**option)
                for i, (kind, option) in enumerate(zip(types, options, strict=True))
            ]
        )
        self.lengths: list[int] = []
        """Real tokens that each row has read."""
        self._leads: list[int] = []
        self._past: _Past | None = None
        self._recording = False
        self._interrupted = False
        """Whether a call has begun and not ended."""
        self._detached = False
        """Whether the last call's states lack the gradient that they should have."""
        self.has_all_columns = True
        """Whether `columns` are those of all calls, as in a mask of all columns; not so after `resumed`."""

    @classmethod
    def resumed(cls, config: Any, states: Sequence[Any], lengths: Sequence[int], columns: int) -> InfiniCache:
        """A cache that resumes from states: of each layer a LayerState, or (keys, values) of `columns` columns.

        lengths: real tokens that each row has read. Without gradients it writes into the states' windows.
        """
        cache = cls(config)
        cache.lengths, cache._leads = list(lengths), [0] * len(lengths)
        cache.has_all_columns = False
        for i, (layer, state) in enumerate(zip(cache.layers, states, strict=True)):
            if isinstance(layer, InfiniLayer):
                layer.state, layer.columns, layer.is_initialized = state, columns, True
            else:
                # A sliding layer would cut its keys and values by columns before padding is taken out.
                cache.layers[i] = stock_layer(*state)
        return cache

    @property
    def memory_layers(self) -> dict[int, InfiniLayer]:
        """The layers with a memory, by index."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, InfiniLayer)}

    @property
    def columns(self) -> int:
        """Columns of all calls so far, padding included."""
        return next(iter(self.memory_layers.values())).columns

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first call."""
        return len(self.lengths) or -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of all calls so far, padding included: what `generate` counts."""
        return self.columns

    def nbytes(self) -> int:
        """Bytes of all tensors, with those that past recording keeps for `crop`."""
        total = 0 if self._past is None else self._past.nbytes()
        total += sum(state_bytes(layer.state) for layer in self.memory_layers.values() if layer.state is not None)
        return total + sum(tensor.nbytes for _, tensor in self._stock_tensors())

    def __repr__(self) -> str:
        """Says how much it has read, and how large it is."""
        segments = f"segments of {self.settings.segment_length:,} tokens"
        return f"InfiniCache({self.columns:,} columns read, {self.nbytes():,} bytes, {segments})"

    # The model calls these.

    @torch.compiler.disable
    def begin(self, call: Call, dtype: torch.dtype) -> None:
        """Give a call the states it starts from. dtype: the model's, whose cache may have been read in another."""
        self._refuse_interrupted()
        if self._detached and torch.is_grad_enabled():
            raise InputError(
                "gradient checkpointing with use_reentrant=True computes no gradient for the cache: pass "
                "use_reentrant=False, or call cache.detach() to end the gradient here"
            )
        # Without gradients the windows are written in place; layers without a memory keep what they read at once.
        self._interrupted = not torch.is_grad_enabled() or len(self.memory_layers) < len(self.layers)
        for layer in self.layers:
            if not isinstance(layer, InfiniLayer) and layer.is_initialized:
                # They are joined with the call's own, and must not make these wider than its queries. (Narrower ones,
                # as autocast leaves them, are widened there.)
                layer.keys, layer.values = (
                    x if torch.promote_types(x.dtype, dtype) == dtype else x.to(dtype)
                    for x in (layer.keys, layer.values)
                )
        call.states = {i: layer.state for i, layer in self.memory_layers.items()}
        if self._recording:
            call.written = {}
            # This replaces what a failed call left, which may have had more rows.
            if self._past is None or not self._past.calls:
                states = {i: None if s is None else fork(s) for i, s in call.states.items()}
                self._past = _Past(states, *self._counts(call), self.columns)

    @torch.compiler.disable
    def commit(self, call: Call) -> None:
        """Store the states that a call returns."""
        self._interrupted = False
        self._detached = call.detached and torch.is_grad_enabled()
        # Set only now: a first call that fails leaves the cache without rows.
        self.lengths, self._leads = _counted(*self._counts(call), call.columns_B, call.columns)
        for i, layer in self.memory_layers.items():
            layer.state, layer.is_initialized = call.results.pop(i, layer.state), True
            layer.columns += call.columns
        if call.written is not None and self._past is not None:
            self._past.calls.append(_Written(call.columns, call.mask_BT, call.written))
            if self._past.recorded > 2 * ROLLBACK:
                self._past.advance(self._past.recorded - ROLLBACK, self.settings)
                for layer in self.layers:
                    _keep_window(layer, ROLLBACK)

    def _counts(self, call: Call) -> tuple[list[int], list[int]]:
        """The rows' real tokens and leads before a call."""
        fresh = [0] * len(call.columns_B)
        return list(self.lengths or fresh), list(self._leads or fresh)

    def _refuse_interrupted(self) -> None:
        if self._interrupted:
            raise InputError(
                "an earlier call with this cache was interrupted and may have written a part of it: begin again "
                "(cache.reset()), or continue with a fork or a file from before that call"
            )

    def refuse_gaps(self, call: Call) -> None:
        """Raise InputError where padding after a row's first token takes the place of tokens in a sliding window."""
        windows = [layer.sliding_window for layer in self.layers if layer.is_sliding]
        if not windows or not self.has_all_columns:
            return
        lengths, leads = _counted(*self._counts(call), call.columns_B, call.columns)
        for row, (length, lead, real) in enumerate(zip(lengths, leads, call.columns_B, strict=True)):
            # The columns from the row's first token to its last. A window that holds them all sees them all.
            columns = self.columns + real[-1] + 1 - lead if real else 0
            if columns > max(length, min(windows)):
                raise InputError(
                    f"attention_mask: row {row} has {columns - length} columns of padding after its first token, and "
                    f"layers that slide over {min(windows)} columns count them as tokens: read rows of different "
                    "lengths in separate calls, without padding"
                )

    # generate() calls these.

    def activate_past_recording(self) -> None:
        """Record what is written from now on, so that `crop` can undo it, as assisted decoding requires."""
        super().activate_past_recording()
        self._recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Undo the last -tokens_to_remove columns; 0 accepts all recorded columns.

        A memory cannot be unwritten, so the state at the last crop is restored and the columns that stay are written
        again. Raises InputError for a positive number, without past recording, or beyond ROLLBACK columns or the last
        crop, detach, `to` or change of rows.
        """
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): pass a negative number, the columns to take back")
        if not self._is_recording():
            if tokens_to_remove:
                raise InputError(
                    "crop: call activate_past_recording() before the tokens that are to be taken back are read"
                )
            return
        past = self._past
        recorded = 0 if past is None else past.recorded
        kept = recorded + tokens_to_remove
        if kept < 0:
            # Refused before anything is cropped.
            raise InputError(
                f"crop({tokens_to_remove}): {recorded} columns were recorded since the last crop (or detach, to, or "
                "change of rows): no more can be taken back"
            )
        super().crop(tokens_to_remove)
        self._past = None
        if not tokens_to_remove or past is None:
            return
        past.advance(kept, self.settings)
        self.lengths, self._leads = past.lengths, past.leads
        for i, layer in self.memory_layers.items():
            layer.state, layer.columns = past.states[i], past.columns

    def _is_recording(self) -> bool:
        # generate() switches a layer's recording off when it gives the cache back.
        self._recording = self._recording and all(layer.record_past for layer in self.memory_layers.values())
        return self._recording

    def reorder_cache(self, beam_idx: Any) -> None:
        """The rows named, in that order (beam search)."""
        super().reorder_cache(beam_idx)
        self._pick(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows named, by index or by a mask."""
        super().batch_select_indices(indices)
        self._pick(indices.nonzero()[:, 0].tolist() if indices.dtype == torch.bool else indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, with the copies next to each other."""
        super().batch_repeat_interleave(repeats)
        self._pick([row for row in range(len(self.lengths)) for _ in range(repeats)])

    def _pick(self, rows: list[int]) -> None:
        if self.lengths:
            self.lengths, self._leads = ([x[row] for row in rows] for x in (self.lengths, self._leads))
        self._past = None

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.lengths, self._leads, self._past = [], [], None
        self._interrupted, self._detached, self.has_all_columns = False, False, True

    # Users call these.

    def fork(self, repeats: int = 1) -> InfiniCache:
        """An independent copy with every row repeated `repeats` times, for several questions about one text."""
        if repeats < 1:
            raise InputError(f"repeats={repeats}: must be at least 1")
        other = copy.copy(self)
        other._past, other._recording = None, False
        other.layers = [copy.copy(layer) for layer in self.layers]
        for layer in other.layers:
            layer.record_past = False
            _keep_window(layer)
            if isinstance(layer, InfiniLayer):
                layer.map(fork)
            elif layer.is_initialized:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        other.lengths, other._leads = list(self.lengths), list(self._leads)
        if repeats > 1:
            other.batch_repeat_interleave(repeats)
        return other

    def detach(self) -> InfiniCache:
        """Cut the gradient history in place, between training sequences. Returns itself."""
        self._detached = False
        return self._map(detach)

    def to(self, device: torch.device | str) -> InfiniCache:
        """Move to another device in place. Returns itself."""
        return self._map(lambda tree: move(tree, device))

    def _map(self, function: Callable[[Any], Any]) -> InfiniCache:
        for layer in self.layers:
            if isinstance(layer, InfiniLayer):
                layer.map(function)
            elif layer.is_initialized:
                layer.keys, layer.values = function((layer.keys, layer.values))
                layer.device = layer.keys.device
        self._past = None
        return self

    def inputs(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        """Arguments with which `generate` continues with `input_ids` [B, T] (only the new tokens) on a fork of this
        cache.

        attention_mask [B, T]: 0 is padding. B rows: as many as were read, or a multiple of them, side by side. Layers
        that slide count columns: where text and question exceed their window, padded questions are an InputError.
        """
        if input_ids.dim() != 2:
            raise InputError(f"input_ids has {input_ids.dim()} axes: must be [rows, tokens]")
        rows, new = input_ids.shape
        if not self.lengths or rows % len(self.lengths):
            raise InputError(
                f"input_ids has {rows} rows, the cache {len(self.lengths)}: pass as many, or so many questions for each"
            )
        if any(lead + length != self.columns for lead, length in zip(self._leads, self.lengths, strict=True)):
            raise InputError("the cache has padding after a row's first token: pass attention_mask for all columns")
        cache = self.fork(rows // len(self.lengths))
        lead_B = torch.tensor(cache._leads, device=input_ids.device)
        read_BC = (torch.arange(self.columns, device=input_ids.device) >= lead_B[:, None]).to(torch.long)
        mask = input_ids.new_ones(rows, new) if attention_mask is None else attention_mask.to(read_BC)
        return {"input_ids": input_ids, "attention_mask": torch.cat([read_BC, mask], 1), "past_key_values": cache}

    # Files.

    def _stock_tensors(self, past: bool = True) -> list[tuple[str, Tensor]]:
        """Keys and values of the layers without a memory. past: with what sliding layers keep for `crop`."""
        found = []
        for i, layer in enumerate(self.layers):
            if isinstance(layer, InfiniLayer) or not layer.is_initialized:
                continue
            first = 0 if past or not layer.is_sliding else -(layer.sliding_window - 1)
            found += [(f"{i}.{name}", getattr(layer, name)[:, :, first:]) for name in ("keys", "values")]
        return found

    def _described(self) -> dict[str, Any]:
        """Settings and sizes that two caches must share to exchange tensors."""
        own, sizes = self.settings.stored(), {"model_type": self.model_type, "n_layers": len(self.layers)}
        names = ("segment_length", "update_rule", "layers", "window", "sinks", "memory_decay", "input_gate", "base")
        return sizes | {name: own[name] for name in names}

    def save(self, path: str | Path) -> None:
        """Write the cache to one safetensors file, completely or not at all. InputError for a cache that has read
        nothing, or whose last call was interrupted."""
        self._refuse_interrupted()
        if not self.lengths:
            raise InputError("the cache is empty: nothing to save")
        stock = self._stock_tensors(past=False)
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in stock}
        for i, layer in self.memory_layers.items():
            assert layer.state is not None
            tensors |= stored_leaves(layer.state, f"{i}.")
        about = {
            "format": FORMAT,
            "model": json.dumps(self._described()),
            "lengths": json.dumps(self.lengths),
            "leads": json.dumps(self._leads),
            "columns": str(self.columns),
        }
        write_tensors(Path(path), tensors, about)

    @classmethod
    def load(cls, path: str | Path, model: Any, device: torch.device | str | None = None) -> InfiniCache:
        """Read what `save` wrote, for the model (or its config) that made it.

        device: where to; without one, each layer's own device. InputError where the file is damaged or another model's.
        The weights are not compared: a cache read by other weights of the same base is garbage.
        """
        try:
            tensors, about = read_tensors(Path(path))
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error
        if about.get("format") != FORMAT:
            raise InputError(f"{path}: format={about.get('format')!r} is not {FORMAT!r}, a saved InfiniCache")
        cache = cls(model)
        stored, own = json.loads(about["model"]), cache._described()
        for key, value in own.items():
            if stored.get(key) != value:
                raise InputError(f"{path}: was saved with {key}={stored.get(key)!r}, the model has {key}={value!r}")
        for name, tensor in tensors.items():
            # Keys of both kinds of layers have their heads in axis 1 and their size in the last.
            if name.endswith(("k_BGNK", ".keys")) and (found := (tensor.shape[1], tensor.shape[-1])) != cache._heads:
                has, wanted = (f"{n_heads} key-value heads of {size}" for n_heads, size in (found, cache._heads))
                raise InputError(f"{path}: was saved with {has}, the model has {wanted}")
        cache.lengths, cache._leads = json.loads(about["lengths"]), json.loads(about["leads"])
        columns = int(about["columns"])
        places = _layer_devices(model)
        for i, layer in enumerate(cache.layers):
            place = torch.device(device) if device is not None else places.get(i, torch.device("cpu"))
            if isinstance(layer, InfiniLayer):
                layer.columns, layer.is_initialized = columns, True
                k, v = (tensors[f"{i}.window.{name}"].to(place) for name in ("k_BGNK", "v_BGNV"))
                layer.state = filled(empty_state(k, v, cache.settings, keep=True), tensors, f"{i}.")
            elif f"{i}.keys" in tensors:
                keys, values = (tensors[f"{i}.{name}"].to(place) for name in ("keys", "values"))
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = columns
        return cache


def _layer_devices(model: Any) -> dict[int, torch.device]:
    """The device of each layer's weights, also inside a model of peft; empty for a config."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = {i: device_of(layer) for i, layer in enumerate(getattr(getattr(model, "model", None), "layers", []))}
    return {i: device for i, device in found.items() if device.type != "meta"}


def device_of(module: Any) -> torch.device:
    """The device of a module's weights, or the one to which accelerate brings them for each call."""
    device: torch.device = next(module.parameters()).device
    hooks: Any = (getattr(part, "_hf_hook", None) for part in module.modules())
    places = [hook.execution_device for hook in hooks if getattr(hook, "execution_device", None) is not None]
    return torch.device(places[0]) if device.type == "meta" and places else device
