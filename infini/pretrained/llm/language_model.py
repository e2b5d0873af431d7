"""A pretrained language model behind the interface of infini.nn.protocols.LanguageModel: state in, state out.

Layers with a memory keep what `infini.pretrained.llm.attention` keeps for them (LayerState). The other layers, and all
layers of a base without a memory, keep keys and values: all of them, or, where all such layers have a sliding window,
as many as that window sees.

Letters: B rows, T tokens of a call, W of them after padding is taken out, C columns of keys and values, G key-value
heads, K d_key, V d_value, N segment length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from infini.errors import InputError
from infini.nn.grid import fresh_clock
from infini.nn.host import to_device, to_numpy
from infini.nn.ops.dtypes import state_dtype, without_autocast
from infini.nn.protocols import Keep, ModelOutput, Projection
from infini.nn.state import Clock, State, fork, map_state, reset_rows, state_class
from infini.pretrained.llm.attention import LayerState, Wanted, empty_memory, empty_state, heads_of, layer_types
from infini.pretrained.llm.cache import InfiniCache, stock_layer
from infini.pretrained.llm.inject import inject, resize_segments
from infini.pretrained.llm.modeling import CausalLMMixin
from infini.pretrained.llm.settings import InfiniSettings, settings_of

MemoryKind = Literal["infini", "none", "full"]


class ShutGate(nn.Module):
    """A gate that is 0 whatever is loaded or trained: nothing of a memory is read."""

    watchers: Mapping[Projection, Sequence[Keep]] = {"queries": (), "keys": ()}
    """Like InfiniGate's; a memory that is not read is never recorded."""

    def forward(self, like: Tensor, wanted: Wanted = "reads") -> Tensor:
        """0 [1, 1, 1] for what is read, 1 for what remains (see InfiniGate); device and dtype are those of `like`."""
        return like.new_full((1, 1, 1), float(wanted != "reads"))


@state_class
class KeyValues(NamedTuple):
    """Rotated keys [B, G, C, K] and values [B, G, C, V] of each row's last C tokens, the last one at the end; 0 where a
    row has read fewer."""

    k_BGCK: Tensor
    v_BGCV: Tensor


@dataclass(frozen=True)
class MemoryOf:
    """The memory of one attention layer of transformers, as an infini.nn.protocols.MemoryLayer."""

    model: PretrainedLM
    attention: Any
    n_heads: int
    n_kv_heads: int
    d_key: int

    @property
    def beta(self) -> Tensor:
        """Gates [H] before the sigmoid (Eq. 6)."""
        return self.attention.infini_gate.beta

    def write_weights(self, k_BTGK: Tensor) -> Tensor | None:
        """The factors [B, T, G] on what tokens with these keys add to the memory; None: 1."""
        gate = self.attention.infini_gate
        if not gate.settings.input_gate:
            return None
        # The layer itself computes them without autocast, too.
        with without_autocast(k_BTGK):
            return gate(k_BTGK.transpose(1, 2)[:, None], "writes")[:, 0].transpose(1, 2)

    def watch(self, projection: Projection, keep: Keep) -> Callable[[], None]:
        """Pass the queries or keys of every call to `keep`, 0 at padding."""
        watchers = self.attention.infini_gate.watchers[projection]

        def passed(x_BWX: Tensor) -> None:
            # Nobody watches when a checkpointed segment is computed again, which must save as many tensors as before.
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                own_BTX = self.model.to_call_columns(x_BWX)
            keep(own_BTX)

        watchers.append(passed)
        return lambda: watchers.remove(passed)


class PretrainedLM(nn.Module):
    """A ...ForCausalLM of transformers as a LanguageModel.

    llm: the model, injected unless memory is "full". segment_length: N.
    memory: "infini"; "none", the same model with segment-local attention and no gates; "full", the base with keys
    and values of everything that it has read.
    """

    def __init__(self, llm: Any, segment_length: int, memory: MemoryKind = "infini") -> None:
        super().__init__()
        if getattr(llm.config, "final_logit_softcapping", None) is not None:
            raise InputError(
                f"{type(llm).__name__}: it caps its logits, which the chunked loss does not support; use it "
                "through infini.pretrained.llm"
            )
        self.llm, self.memory = llm, memory
        self.settings: InfiniSettings | None = None if memory == "full" else settings_of(llm.config)
        if self.settings is not None and self.settings.segment_length != segment_length:
            self.settings = resize_segments(llm, segment_length)
        self.segment_length = segment_length
        self._columns_read: tuple[Tensor, Tensor, int] | None = None
        """Set while rows are read whose padding was moved: the columns order_BW of the call that they take, a mask of
        the real tokens among these, and the call's number of columns."""
        if memory == "none":
            for block in llm.model.layers:
                if hasattr(block.self_attn, "infini_gate"):
                    block.self_attn.infini_gate = ShutGate()
        config, kinds = llm.config, layer_types(llm.config)
        _, self._n_kv_heads, self._d_key = heads_of(config)
        with_memory = () if self.settings is None else self.settings.layers
        self._stock = [i for i in range(len(kinds)) if i not in with_memory]
        slides = bool(self._stock) and all(kinds[i] == "sliding_attention" for i in self._stock)
        self._columns: int | None = config.sliding_window - 1 if slides else None
        """Columns of keys and values that are kept; None: all."""

    @property
    def memory_layers(self) -> list[MemoryOf]:
        """The layers with a memory that is read and written, from the bottom."""
        if self.settings is None or self.memory != "infini":
            return []
        layers = (block.self_attn for block in self.llm.model.layers)
        heads = heads_of(self.llm.config)
        return [MemoryOf(self, layer, *heads) for layer in layers if hasattr(layer, "infini_gate")]

    @property
    def memory_is_a_sum(self) -> bool:
        """Whether there is a memory that is read and written."""
        return bool(self.memory_layers)

    takes_write_weights = False

    @property
    def called_layers(self) -> list[Any]:
        """All layers; see infini.nn.protocols.OptionalMembers."""
        return list(self.llm.model.layers)

    hides_states = True

    @property
    def checkpoint_activations(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        return bool(self.llm.is_activation_checkpointing)

    @checkpoint_activations.setter
    def checkpoint_activations(self, value: bool) -> None:
        if value and self._stock:
            raise InputError(
                "recipe.checkpoint_activations=true: not for a model that has layers without a memory; set it to false"
            )
        if value:
            self.llm.activation_checkpointing_enable({"use_reentrant": False})
        elif self.checkpoint_activations:
            self.llm.activation_checkpointing_disable()

    @property
    def gradient_horizon(self) -> int | None:
        """Segments that a gradient reaches back; see LanguageModel."""
        if self.memory != "none" or self._stock or self.settings is None or self.settings.sinks:
            return None
        return len(self.settings.layers) * (self.settings.depth - 1)

    def gates(self) -> list[list[float]] | None:
        """sigmoid(beta) by layer and head, of the layers with a memory; None where no gate can open."""
        if self.memory != "infini":
            return None
        return [torch.sigmoid(layer.beta.detach().float()).tolist() for layer in self.memory_layers]

    @property
    def xl_cache(self) -> int:
        """Tokens before the segment that local attention sees (window=previous)."""
        return 0 if self.settings is None else (self.settings.depth - 1) * self.segment_length

    def state_floats(self, n_segments: int) -> int:
        """Numbers per row in the memories (M and z), for any number of segments; keys and values are none."""
        if self.settings is None or self.memory == "none":
            return 0
        head = self._d_key * (self._d_key + 1)
        return len(self.settings.layers) * self.settings.depth * self._n_kv_heads * head

    def window_floats(self, n_segments: int) -> int | None:
        """Numbers per row in the keys and values of the segments before the last, which layers without a memory keep
        (all layers with memory=full); None where such layers do not keep all of them."""
        kinds = {layer_types(self.llm.config)[i] for i in self._stock}
        each = 2 * self._d_key * self._n_kv_heads * len(self._stock)
        return each * self.segment_length * (n_segments - 1) if kinds <= {"full_attention"} else None

    def receptive_field(self, n_segments: int) -> int:
        """Tokens that can change the last segment's output, counted back from its end."""
        horizon = self.gradient_horizon
        return self.segment_length * (n_segments if horizon is None else min(n_segments, 1 + horizon))

    def resize_segments(self, segment_length: int) -> None:
        """Change the segment length from the next call on. Weights do not depend on it; states do."""
        if self.settings is not None and segment_length != self.segment_length:
            self.settings = resize_segments(self.llm, segment_length)
        self.segment_length = segment_length

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary."""
        return self.llm.get_output_embeddings()(hidden)

    @property
    def output_weight(self) -> Tensor:
        """The output embedding [vocabulary, d_model]."""
        return self.llm.get_output_embeddings().weight

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> State:
        """The state of rows that have read nothing."""
        weight = self.llm.get_input_embeddings().weight
        device = weight.device if device is None else torch.device(device)

        def zeros(columns: int) -> Tensor:
            return torch.zeros(batch_size, self._n_kv_heads, columns, self._d_key, device=device, dtype=weight.dtype)

        def layer(index: int) -> LayerState | KeyValues:
            if index in self._stock or self.settings is None:
                return KeyValues(zeros(self._columns or 0), zeros(self._columns or 0))
            state = empty_state(zeros(0), zeros(0), self.settings, keep=True)
            return state if self.memory == "infini" else _without_memory(state)

        # No write weights: the clock's are those of 0 tokens.
        clock = fresh_clock(batch_size, 0, state_dtype(weight.dtype))
        return State(clock, tuple(layer(i) for i in range(len(self.llm.model.layers))))

    def forward(
        self,
        ids_BT: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        reset_BT: Tensor | None = None,
        write_weight_BT: Tensor | None = None,
    ) -> ModelOutput:
        """Final hidden states [B, T, d_model], 0 at padding, and the state after them; see LanguageModel."""
        if write_weight_BT is not None:
            raise InputError("write_weight_BT: a pretrained language model has no write weights; leave it out")
        B, T = ids_BT.shape
        state = self.init_state(B, ids_BT.device) if state is None else state
        if len(state.clock.position_B) != B:
            rows = len(state.clock.position_B)
            raise ValueError(f"batch size {B}, state has {rows}: pass a fresh init_state({B})")
        state = State(state.clock.on_host(), state.layers)
        reset, mask = (None if marks is None else to_numpy(marks) for marks in (reset_BT, mask_BT))
        marked = [] if reset is None else np.flatnonzero(reset.any(0)).tolist()
        parts = []
        for start, stop in pairwise(sorted({0, *marked, T})):
            if reset is not None and start in marked:
                state = reset_rows(state, torch.from_numpy(reset[:, start]))
            span = slice(start, stop)
            hidden, state = self._read(ids_BT[:, span], state, None if mask is None else mask[:, span])
            parts.append(hidden)
        hidden_BTD = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return ModelOutput(hidden_BTD, state, hidden_BTD.new_zeros(()))

    def prefill(self, ids_BT: Tensor, state: State, reset_BT: Tensor | None = None) -> State:
        """The state after a call. No logits are computed."""
        return self(ids_BT, state, reset_BT=reset_BT).state

    def _read(self, ids_BT: Tensor, state: State, mask_BT: np.ndarray | None) -> tuple[Tensor, State]:
        """A call without resets. Padding is moved to the end of the rows, where it changes nothing before it."""
        if mask_BT is None or mask_BT.all():
            new = [ids_BT.shape[1]] * len(ids_BT)
            return self._read_rows(ids_BT, state, new)
        new = mask_BT.sum(1).tolist()
        if not max(new):
            return self._nothing_read(ids_BT), state
        order = np.argsort(~mask_BT, axis=1, kind="stable")[:, : max(new)]
        order_BW = to_device(order, ids_BT.device)
        real_BW1 = to_device(np.take_along_axis(mask_BT, order, 1), ids_BT.device)[..., None]
        self._columns_read = (order_BW, real_BW1, ids_BT.shape[1])
        try:
            found_BWD, state = self._read_rows(ids_BT.gather(1, order_BW), state, new)
            return self.to_call_columns(found_BWD), state
        finally:
            self._columns_read = None

    def _nothing_read(self, ids_BT: Tensor) -> Tensor:
        """Hidden states [B, T, d_model] of a call that is all padding, and zeros for those who record the layers."""
        weight = self.llm.get_input_embeddings().weight
        for layer in self.memory_layers:
            for projection, heads in (("queries", layer.n_heads), ("keys", layer.n_kv_heads)):
                for keep in layer.attention.infini_gate.watchers[projection]:
                    keep(weight.new_zeros(*ids_BT.shape, heads * layer.d_key))
        return weight.new_zeros(*ids_BT.shape, weight.shape[1])

    def to_call_columns(self, x_BWX: Tensor) -> Tensor:
        """Move the results of the tokens that are read now [B, W, X] to the columns of the call [B, T, X]; 0 at
        padding."""
        if self._columns_read is None:
            return x_BWX
        order_BW, real_BW1, columns = self._columns_read
        empty = x_BWX.new_zeros(x_BWX.shape[0], columns, x_BWX.shape[2])
        return empty.scatter(1, order_BW[..., None].expand_as(x_BWX), x_BWX * real_BW1)

    def _read_rows(self, ids_BW: Tensor, state: State, new: list[int]) -> tuple[Tensor, State]:
        """A call whose row b has new[b] real tokens, at its beginning."""
        device, W = ids_BW.device, ids_BW.shape[1]
        before = state.clock.position_B.tolist()
        after = [position + more for position, more in zip(before, new, strict=True)]
        layers = list(state.layers)
        C = 0
        for i in self._stock:
            # Rows that were reset or taken out may have been the longest.
            C = layers[i].k_BGCK.shape[2] if self._columns is not None else max(before)
            layers[i] = map_state(lambda x, C=C: x[:, :, x.shape[2] - C :], layers[i])
        column, held_B = np.arange(C + W), np.minimum(before, C)
        seen_BC = (column >= C - held_B[:, None]) & (column < np.array(new)[:, None] + C)
        ragged = not seen_BC.all() if self._stock else len(set(new)) > 1
        options: dict[str, Any] = {}
        if ragged:
            # The mask stays on the host, where calls are planned.
            options["attention_mask"] = torch.from_numpy(seen_BC if self._stock else seen_BC[:, C:]).long()
            masks = self._stock_masks(seen_BC, W, device) if self._stock else None
            if masks is not None:
                options["attention_mask" if self.settings is None else "stock_mask"] = masks
        if self._stock:
            # Positions stay on the host, too, where an injected model looks for packed sequences.
            positions = torch.from_numpy(np.array(before)[:, None] + np.arange(W))
            options["position_ids"] = to_device(positions, device) if self.settings is None else positions
        # A cache of transformers that resumes from these states. It writes to no tensor of theirs.
        cache: Any = DynamicCache()
        if self.settings is None:
            cache.layers = [stock_layer(*layer) for layer in layers]
        else:
            states = [layer if isinstance(layer, KeyValues) else self._resumed(layer) for layer in layers]
            cache = InfiniCache.resumed(self.llm, states, before, C)
        out = self.llm.model(input_ids=ids_BW, past_key_values=cache, use_cache=True, **options)
        position_B = np.array(after)
        slot_B = position_B % self.segment_length
        slots = {position % self.segment_length for position in after}
        crossed = any(a // self.segment_length != b // self.segment_length for a, b in zip(before, after, strict=True))
        found: list[Any] = []
        for i in range(len(layers)):
            if i in self._stock:
                found.append(self._kept(cache.layers[i], W, new, after, ragged))
                continue
            layer = cache.layers[i].state
            layer = _without_stale_columns(layer, slot_B) if crossed else layer
            found.append(layer if self.memory == "infini" else _without_memory(layer))
        slot = slots.pop() if len(slots) == 1 else None
        clock = Clock(torch.from_numpy(position_B), torch.from_numpy(slot_B), state.clock.weight_BN, slot)
        return out.last_hidden_state, State(clock, tuple(found))

    def _stock_masks(
        self, seen_BC: np.ndarray, W: int, device: torch.device
    ) -> Tensor | dict[str, Tensor | None] | None:
        """The mask [B, 1, W, C] of layers without a memory, by their kind if there are several. seen_BC: which columns
        are real tokens; the last W are those of the call. None: transformers must make the masks.

        transformers' own functions look whether a mask is needed, which they read from the device.
        """
        config, kinds = self.llm.config, layer_types(self.llm.config)
        kernel = config._attn_implementation if self.settings is None else config.infini["local_attention"]
        if kernel not in ("sdpa", "eager") or not set(kinds) <= {"full_attention", "sliding_attention"}:
            return None
        column = np.arange(seen_BC.shape[1])
        query_W1 = column[-W:, None]
        made: dict[str, Tensor | None] = dict.fromkeys(kinds)
        for kind in {kinds[i] for i in self._stock}:
            seen_WC = column <= query_W1
            if kind == "sliding_attention":
                seen_WC &= column > query_W1 - config.sliding_window
            mask = to_device(seen_WC & seen_BC[:, None, None], device)
            if kernel == "eager":
                # Added to the logits. It is not -inf, because a row may have no column that it sees.
                dtype = self.llm.get_input_embeddings().weight.dtype
                mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, torch.finfo(dtype).min)
            made[kind] = mask
        return made if len(made) > 1 else made[kinds[0]]

    def _resumed(self, state: LayerState) -> LayerState:
        if self.memory != "infini":
            state = _with_empty_memory(state)
        if torch.is_grad_enabled():
            # Attention copies what it writes to.
            return state
        before = fork(state.before)
        if before:
            before = before._replace(memory=state.before.memory)  # type: ignore[union-attr]
        return state._replace(window=fork(state.window), before=before, sinks=fork(state.sinks))

    def _kept(self, layer: Any, width: int, new: list[int], after: list[int], ragged: bool) -> KeyValues:
        """The keys and values that a stock layer keeps after a call of `width` columns."""
        k, v = layer.keys, layer.values
        total = k.shape[2]
        C = self._columns if self._columns is not None else min(max(after), total)
        if not ragged:
            return KeyValues(*((k, v) if total == C else (x[:, :, total - C :].clone() for x in (k, v))))
        column = np.arange(total - C, total)
        source_BC = to_device(np.maximum(column - (width - np.array(new))[:, None], 0), k.device)
        empty_BC = to_device(column < total - np.array(after)[:, None], k.device)

        def aligned(x: Tensor) -> Tensor:
            index = source_BC[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
            return x.gather(2, index).masked_fill(empty_BC[:, None, :, None], 0)

        return KeyValues(aligned(k), aligned(v))


def _without_memory(state: LayerState) -> LayerState:
    """The state without the memories, which memory=none never reads."""
    before = state.before and state.before._replace(memory=())  # type: ignore[arg-type]
    return state._replace(memory=(), pending=(), before=before)  # type: ignore[arg-type]


def _with_empty_memory(state: LayerState) -> LayerState:
    memory = empty_memory(*state.window)
    before = state.before and state.before._replace(memory=memory)
    return state._replace(memory=memory, pending=memory, before=before)


def _without_stale_columns(state: LayerState, slot_B: np.ndarray) -> LayerState:
    """The state with 0 where the unfinished segment has no token yet, so that equal histories have equal states."""

    def cleaned(x_BGNK: Tensor) -> Tensor:
        stale_BN = np.arange(x_BGNK.shape[2]) >= slot_B[:, None]
        return x_BGNK.masked_fill(to_device(stale_BN, x_BGNK.device)[:, None, :, None], 0)

    before = state.before
    if before:
        before = before._replace(next_k_BGNK=cleaned(before.next_k_BGNK))
    return state._replace(window=map_state(cleaned, state.window), before=before)


def build(
    base: Any,
    segment_length: int,
    *,
    memory: MemoryKind,
    gate_init: float,
    dtype: str,
    train: str,
    lora_rank: int | None,
    **options: Any,
) -> PretrainedLM:
    """The model of these options of infini.models.llm.LLMConfig; base: an infini.pretrained.llm.bases.Base. Raises
    InputError for what cannot be."""
    llm = base.load(getattr(torch, dtype))
    if isinstance(llm, CausalLMMixin):
        _check_injected(base, llm, memory, options)
        if gate_init != USUAL["gate_init"] and any((beta != gate_init).any() for beta in _gates(llm)):
            raise InputError(f"model.gate_init={gate_init!r}: {base.where} has gates of its own; leave it out")
    elif memory == "full":
        given = {**options, "gate_init": gate_init}
        for name, usual in USUAL.items():
            if (value := given[name]) != usual:
                raise InputError(f"model.{name}={value!r}: has no effect with model.memory=full; leave it out")
    else:
        inject(llm, segment_length, gate_init=gate_init, **options)
    model = PretrainedLM(llm, segment_length, memory)
    if train == "lora":
        _add_adapters(base, llm, lora_rank or LORA_RANK)
    if train != "all":
        trained = {"gates": (), "gates_and_norms": ("norm",), "lora": ("lora_",)}[train]
        for name, parameter in model.named_parameters():
            gate = ".infini_gate." in name
            parameter.requires_grad_(gate or any(part in name for part in trained))
    return model


USUAL = {"update_rule": "delta", "gate_init": -4.0, "window": "segment", "sinks": 0, "layers": None}
"""Options of a memory, and their default values (infini.models.llm)."""
LORA_RANK = 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
"""The attention's projections, which families name alike."""


def _add_adapters(base: Any, llm: Any, rank: int) -> None:
    """Add LoRA's adapters to all projections of the attention (Hu et al. 2021), by peft. They start without an effect.

    rank: r; the adapters' output is scaled by 2, as with an alpha of 2 r. Raises InputError where peft is missing.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise InputError("model.train='lora': needs the package peft: pip install peft") from error
    found = {name.rpartition(".")[2] for name, _ in llm.named_modules()}
    targets = [name for name in PROJECTIONS if name in found]
    if not targets:
        raise InputError(f"model.train='lora': {base.where} has none of the projections {', '.join(PROJECTIONS)}")
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), llm)
    for name, parameter in llm.named_parameters():
        if "lora_" in name:
            # An optimizer's steps are lost in the rounding of bfloat16.
            parameter.data = parameter.data.float()


def without_adapters(llm: Any) -> Any:
    """The model with LoRA's adapters added into its weights, in place. These are then float32, because bfloat16 would
    round most of what the adapters learned away."""
    if not any("lora_" in name for name, _ in llm.named_parameters()):
        return llm
    from peft.tuners.tuners_utils import BaseTunerLayer

    llm.float()
    for name, layer in list(llm.named_modules()):
        if hasattr(layer, "scalar_embed_scale"):
            # Gemma's factor on its embeddings: no file of weights has it, and it was rounded to bfloat16.
            layer.embed_scale.fill_(layer.scalar_embed_scale)
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, own = name.rpartition(".")
            setattr(llm.get_submodule(parent), own, layer.get_base_layer())
    return llm


def _gates(llm: Any) -> list[Tensor]:
    return [gate for name, gate in llm.named_parameters() if name.endswith("infini_gate.beta")]


def _check_injected(base: Any, llm: Any, memory: str, options: dict[str, Any]) -> None:
    """A base that has a memory already keeps its own settings: InputError where others are asked for."""
    if memory == "full":
        raise InputError(f"model.memory='full': {base.where} has a memory; name the base that it was made of")
    own = settings_of(llm.config)
    for name, value in options.items():
        found = getattr(own, name)
        if value is not None and value != (list(found) if name == "layers" else found):
            raise InputError(f"model.{name}={value!r}: {base.where} was injected with {found!r}; set that")
