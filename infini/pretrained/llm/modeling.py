"""The classes of injected models: what they add to the classes of their family, and what they change in them.

A family's three classes (causal model, inner model, attention) are subclassed at run time with the mixins below; their
own forward passes run. Attention runs with the identity as rotary embedding and without a cache, so that queries and
keys reach `infini.pretrained.llm.attention` after their norms and before rotation.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers import initialization as hf_init
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from infini.errors import InputError
from infini.nn.host import to_device, to_numpy
from infini.pretrained.llm import saving
from infini.pretrained.llm.attention import NAME, Call, InfiniGate, heads_of, kinds_without_memory
from infini.pretrained.llm.cache import InfiniCache, device_of
from infini.pretrained.llm.plan import Columns, group_rows, real_columns
from infini.pretrained.llm.settings import InfiniSettings, settings_of

# The class that a mixin stands before; which one, only a family knows.
Stock: Any = object


class AttentionMixin(Stock):
    """Precedes a family's attention class, in layers with a memory."""

    family_module: str
    """The module that the family's class is from."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        """The family's forward, with nothing rotated, masked or cached before the attention function."""
        cos, _ = position_embeddings
        one = cos.new_ones(1, 1, cos.shape[-1])
        return super().forward(
            hidden_states,
            position_embeddings=(one, torch.zeros_like(one)),
            attention_mask=None,
            past_key_values=None,
            **options,
        )


class _Initialised(Stock):
    """The common base of the inner and the causal model."""

    def get_correct_attn_implementation(self, requested_attention: Any, is_init_check: bool = False) -> str:
        """Always ours; the kernel of local attention is an option of `inject`."""
        return NAME

    def _init_weights(self, module: Any) -> None:
        # from_pretrained asks for gates that a checkpoint lacks.
        super()._init_weights(module)
        if isinstance(module, InfiniGate):
            for parameter, value in module.initial():
                hf_init.copy_(parameter, value)


class ModelMixin(_Initialised):
    """Precedes a family's model without a head."""

    infini_settings: InfiniSettings

    @torch.compiler.disable(recursive=False)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        stock_mask: Any = None,
        **options: Any,
    ) -> Any:
        """The family's forward with a plan of the segments; a cache, if any, continues.

        attention_mask: 2D, over all columns of the cache and the call, a row each or one for all; 0 is padding. In
        training no cache is made unless use_cache says so or one is passed.
        stock_mask: what layers without a memory take as their attention_mask: 4D, or one by kind of layer. Default:
        transformers makes it of the attention_mask.
        """
        x = input_ids if input_ids is not None else inputs_embeds
        if self.config._attn_implementation != NAME:
            raise InputError(
                f"config._attn_implementation={self.config._attn_implementation!r}: an injected model has "
                f"{NAME!r}; choose the kernel of local attention by inject(..., local_attention=...)"
            )
        if x is None:
            raise InputError("pass input_ids or inputs_embeds")
        if options.get("output_attentions") or self.config.output_attentions:
            raise InputError(
                "output_attentions: local attention and memory have no common attention matrix; leave it out"
            )
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and len(attention_mask) == 1:
            # One for all rows; layers without a memory need it for each.
            attention_mask = attention_mask.expand(len(x), -1)
        again = self.training and getattr(self, "is_activation_checkpointing", False)
        call, cache, position_ids = self._begin(x, attention_mask, position_ids, past_key_values, use_cache, again)
        every_layer = len(self.infini_settings.layers) == self.config.num_hidden_layers
        if attention_mask is None and every_layer and (again or cache is None):
            # transformers would look for packed sequences, for which it reads positions back from the device. A mask of
            # four axes it passes on, and no layer reads it.
            attention_mask = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=x.device)
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask if stock_mask is None else stock_mask,
            position_ids=position_ids,
            # Recomputed layers must not see it: the plan has what they need.
            past_key_values=None if again else cache,
            inputs_embeds=inputs_embeds,
            use_cache=cache is not None and not again,
            infini=call,
            **options,
        )
        if cache is not None:
            # Where nothing is trained, no gradient is missing.
            call.detached &= output[0].requires_grad
            cache.commit(call)
            if hasattr(output, "past_key_values"):
                output.past_key_values = cache
        return output

    @torch.compiler.disable
    def _begin(
        self, x: Tensor, mask: Any, position_ids: Any, given: Any, use_cache: bool | None, again: bool
    ) -> tuple[Call, InfiniCache | None, Any]:
        """The plan of a call, its cache if it has one, and its positions. It runs on the host, outside compiled
        graphs."""
        settings, (B, T) = self.infini_settings, x.shape[:2]
        cache = self._cache_of(given, use_cache, again)
        mask_BT = self._checked_mask(mask, position_ids, cache, B, T)
        lengths = cache.lengths if cache is not None and cache.lengths else [0] * B
        if len(lengths) != B:
            rows = len(lengths)
            more = B % rows == 0
            advice = f"past_key_values=cache.fork({B // rows})" if more else "as many, or a fresh InfiniCache(model)"
            raise InputError(f"the batch has {B} rows, the cache {rows}: pass {advice}")
        columns_B = real_columns(mask_BT, B, T)
        groups = group_rows(lengths, columns_B, T, settings.segment_length, settings.depth)
        call = Call(groups, columns_B, T, mask_BT, self._tables(x.device), keep=cache is not None, again=again)
        has_read_padding = cache is not None and any(length != cache.columns for length in lengths)
        if (mask_BT is not None or has_read_padding) and kinds_without_memory(self.config):
            if cache is not None and has_read_padding and cache.has_all_columns and mask is None:
                raise InputError(
                    "attention_mask: the cache has read padding, which layers without a memory would see; pass the "
                    "mask of all columns, or generate(**cache.inputs(input_ids))"
                )
            # Training without a cache refuses the same masks as generation with one.
            (InfiniCache(self.config) if cache is None else cache).refuse_gaps(call)
            if position_ids is None:
                # Layers without a memory would count columns, and generate() counts tokens in a later call.
                position_ids = torch.from_numpy(_positions(lengths, columns_B, T))
        if cache is not None:
            cache.begin(call, self.embed_tokens.weight.dtype)
        return call, cache, None if position_ids is None else to_device(position_ids, x.device)

    def _cache_of(self, given: Any, use_cache: bool | None, again: bool) -> InfiniCache | None:
        if given is None:
            if use_cache is None:
                use_cache = self.config.use_cache and not self.training
            return InfiniCache(self.config) if use_cache and not again else None
        if not isinstance(given, InfiniCache):
            raise InputError(
                f"past_key_values is a {type(given).__name__}: an injected model takes an InfiniCache(model), or None"
            )
        if len(given.layers) != len(self.layers):
            raise InputError(f"the cache was made for {len(given.layers)} layers, the model has {len(self.layers)}")
        if given.settings != self.infini_settings:
            raise InputError(f"the cache was made for {given.settings}, the model has {self.infini_settings}")
        if again and kinds_without_memory(self.config):
            raise InputError(
                "gradient checkpointing and a cache go together only where every layer has a memory: "
                f"layers={list(self.infini_settings.layers)} of {len(self.layers)}; generate in evaluation mode "
                "(model.eval()), or with use_cache=False"
            )
        return given

    def _checked_mask(self, mask: Any, position_ids: Any, cache: InfiniCache | None, B: int, T: int) -> Tensor | None:
        """The mask of this call's columns [B, T]; None where all are real."""
        positions = to_numpy(position_ids) if position_ids is not None and T > 1 and position_ids.dim() == 2 else None
        if mask is None:
            if positions is not None:
                _refuse_packed(positions, np.ones_like(positions, dtype=bool))
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise InputError("attention_mask: must be a 2D padding mask [rows, columns]")
        if len(mask) != B:
            raise InputError(f"attention_mask has {len(mask)} rows, the batch {B}")
        before = cache.columns if cache is not None else 0
        if mask.shape[1] != before + T and (mask.shape[1] != T or kinds_without_memory(self.config)):
            raise InputError(
                f"attention_mask has {mask.shape[1]} columns: the cache has {before} and the call {T}, so it must have "
                f"{before + T}"
            )
        mask, earlier = mask[:, -T:] != 0, mask[:, :-T]
        if cache is not None and T > 1 and earlier.shape[1]:
            # A check at every token would read the whole mask back from the device; generate() has checked it once.
            _refuse_hidden(earlier, cache)
        real = to_numpy(mask)
        if positions is not None:
            _refuse_packed(np.broadcast_to(positions, real.shape), real)
        return None if real.all() else mask

    def _tables(self, device: torch.device) -> dict[str | None, tuple[Tensor, Tensor]]:
        """Cosines and sines of the positions in use [positions, R], by layer type; made once.

        They come from a separate rotary embedding, because dynamic kinds change with longer inputs.
        """
        dtype = self.embed_tokens.weight.dtype
        found = self.__dict__.setdefault("_infini_tables", {})
        if (device, dtype) not in found:
            with torch.inference_mode(False), torch.no_grad():
                rotary = type(self.rotary_emb)(copy.deepcopy(self.config)).to(device)
                like = torch.zeros(1, 1, 1, dtype=dtype, device=device)
                position = torch.arange(self.infini_settings.positions, device=device)[None]
                kinds = getattr(rotary, "layer_types", None) or [None]
                tables = {kind: rotary(like, position, *([kind] if kind else [])) for kind in kinds}
            found[device, dtype] = {kind: (cos[0], sin[0]) for kind, (cos, sin) in tables.items()}
        return found[device, dtype]


def _positions(lengths: Sequence[int], columns_B: Sequence[Columns], columns: int) -> np.ndarray:
    """The number of its row's tokens before each column [B, columns]; 0 at padding. lengths: those before the call."""
    positions = np.zeros((len(lengths), columns), dtype=np.int64)
    for row, (length, real) in enumerate(zip(lengths, columns_B, strict=True)):
        positions[row, list(real)] = length + np.arange(len(real))
    return positions


def _refuse_packed(positions_BT: np.ndarray, real_BT: np.ndarray) -> None:
    """Raises InputError for positions that begin again within a row, as those of packed sequences do."""
    for positions, real in zip(positions_BT, real_BT, strict=True):
        if (np.diff(positions[real]) != 1).any():
            raise InputError("position_ids: packed sequences have no segments of their own; pad them instead")


def _refuse_hidden(earlier: Tensor, cache: InfiniCache) -> None:
    """Raises InputError for a mask of the columns before a call [rows, columns] that is not that of what was read."""
    if not cache.has_all_columns or not cache.lengths:
        return
    seen = to_numpy((earlier != 0).sum(-1)).tolist()
    if seen != cache.lengths:
        raise InputError(
            f"attention_mask shows {seen} of the columns before this call, the cache has read {cache.lengths}: "
            "tokens that were read cannot be hidden later; read such rows again without this cache"
        )


class CausalLMMixin(_Initialised):
    """Precedes a family's ...ForCausalLM."""

    _keep_in_fp32_modules_strict = ("infini_gate",)

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        settings = settings_of(config)
        super().__init__(config, *args, **options)
        convert(self, settings)
        self.post_init()

    # A family's own may throw a cache away that knows no length limit (Phi-3).
    prepare_inputs_for_generation = GenerationMixin.prepare_inputs_for_generation

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        *args: Any,
        **options: Any,
    ) -> None:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise InputError(
                f"cache_implementation={kind!r}: an injected model has its own bounded cache; leave it out"
            )
        if generation_config.assistant_early_exit is not None:
            raise InputError(
                "assistant_early_exit: the first layers of an injected model are not a model by themselves"
            )
        cache = model_kwargs.get("past_key_values")
        if cache is None:
            if generation_config.use_cache is not False:
                cache = model_kwargs["past_key_values"] = InfiniCache(self.config)
                if generation_config.is_assistant:
                    cache.activate_past_recording()
            return
        if not isinstance(cache, InfiniCache):
            raise InputError(
                f"past_key_values is a {type(cache).__name__}: an injected model takes an InfiniCache(model), or None"
            )
        if generation_config.use_cache is False:
            # generate() would pass the whole text at every step, and the cache would read it again and again.
            raise InputError("use_cache=False: generate() reads and writes past_key_values; leave one of the two out")
        mask = model_kwargs.get("attention_mask")
        # generate() puts a mask of ones aside.
        width = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", None)
        if width is not None and width <= cache.columns:
            raise InputError(
                f"the cache has read {cache.columns} tokens, the input has {width}: pass all tokens from the first on, "
                "or only the new ones by generate(**cache.inputs(input_ids))"
            )
        copies = max(generation_config.num_beams, generation_config.num_return_sequences)
        repeats = copies if cache.batch_size == batch_size else 1
        if mask is not None and len(mask) in (repeats, repeats * cache.batch_size):
            _refuse_hidden(mask[::repeats, : cache.columns].expand(cache.batch_size, -1), cache)
        if repeats > 1:
            # generate() has repeated the rows of the other inputs.
            cache.batch_repeat_interleave(repeats)
        cache._is_user_defined = True

    def _assisted_decoding(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        cache, mask = options.get("past_key_values"), options.get("attention_mask")
        width = mask.shape[1] if mask is not None else getattr(options["generation_config"], "_mask_length", None)
        read = 0 if cache is None else cache.columns
        if read and mask is not None and not mask.all():
            # transformers cuts the mask to the columns of input_ids.
            raise InputError("assisted decoding cannot continue a cache with padding: decode without an assistant")
        if read and width == input_ids.shape[1]:
            # Its first step reads all of them, whatever the cache has read.
            raise InputError(
                f"assisted decoding would read the {read} tokens of the cache again: pass only the new ones, "
                "by generate(**cache.inputs(input_ids))"
            )
        return super()._assisted_decoding(input_ids, *args, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: the file beside the weights says where the class is."""

    def save_pretrained(self, save_directory: Any, *, push_to_hub: bool = False, **options: Any) -> None:
        """Save as the base does, with a model card and a file that lets processes without `infini` imported find this
        class. push_to_hub: upload all of it, with the options of `push_to_hub`."""
        known = inspect.signature(saving.push_to_hub).parameters
        hub = {name: value for name, value in options.items() if name in known}
        # Both read these two.
        own = {name: value for name, value in options.items() if name not in hub or name in ("token", "max_shard_size")}
        super().save_pretrained(save_directory, **own)
        if not options.get("is_main_process", True) or not Path(save_directory).is_dir():
            # Another process writes, or the base has logged that the path is a file.
            return
        saving.write_beside_weights(self, save_directory)
        if push_to_hub:
            saving.push_to_hub(self, **{"repo_id": Path(save_directory).name, **hub})

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload what `save_pretrained` writes; a card that the user wrote stays. Options: see saving.push_to_hub."""
        return saving.push_to_hub(self, repo_id, **options)


def subclass(mixin: type, stock: type) -> type:
    """The mixin before a class of transformers; one class for the same two."""
    if (mixin, stock) not in _SUBCLASSES:
        body = {"__module__": __name__, "__doc__": mixin.__doc__, "family_module": stock.__module__}
        _SUBCLASSES[mixin, stock] = type(f"Infini{stock.__name__}", (mixin, stock), body)
        # pickle looks for the class here.
        globals()[f"Infini{stock.__name__}"] = _SUBCLASSES[mixin, stock]
    return _SUBCLASSES[mixin, stock]


_SUBCLASSES: dict[tuple[type, type], type] = {}


def __getattr__(name: str) -> type:
    """The class of this name, made now: pickle asks for those of a model that another process injected."""
    if name.startswith("Infini"):
        from infini.pretrained.llm.families import CLASSES

        for _, model_class in CLASSES.values():
            module = model_class.__bases__[1].__module__
            stock: Any = getattr(sys.modules[module], name.removeprefix("Infini"), None)
            if name.endswith(("Attention", "Model")) and getattr(stock, "__module__", None) == module:
                return subclass(AttentionMixin if name.endswith("Attention") else ModelMixin, stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def convert(model: Any, settings: InfiniSettings) -> None:
    """Give the layers of a causal model their memory: subclasses in place, and a gate in each layer."""
    inner = model.model
    _turn_into(inner, ModelMixin)
    apply_settings(model, settings)
    # transformers keeps by class what output_hidden_states can give, and notes it where a model is made.
    _CAN_RECORD_REGISTRY[inner] = inner._can_record_outputs
    for i, block in enumerate(inner.layers):
        if i in settings.layers:
            device = device_of(block.self_attn)
            _turn_into(block.self_attn, AttentionMixin)
            block.self_attn.infini_gate = InfiniGate(*heads_of(model.config), settings, device)
    model.config._attn_implementation = NAME


def apply_settings(model: Any, settings: InfiniSettings) -> None:
    """Give the parts of an injected model its settings."""
    inner = model.model
    inner.infini_settings = settings
    inner.__dict__.pop("_infini_tables", None)
    for block in inner.layers:
        block.self_attn.infini_settings = settings


def _turn_into(module: Any, mixin: type) -> None:
    module.__class__ = subclass(mixin, type(module))
    if hasattr(module, "_old_forward"):
        # accelerate's hooks have kept the forward of the class before.
        module._old_forward = types.MethodType(type(module).forward, module)
