"""Loads base models from the hub, a folder, a GGUF file, or the package that holds SmolLM2.

Errors are InputError of one line that names the key `setting`, its value, and what to do.
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from infini.errors import InputError, did_you_mean, first_line
from infini.pretrained.base_names import ALLOWED, PACKAGE, SMOLLM2, local_path
from infini.pretrained.llm.attention import heads_of
from infini.system.network import reachable
from infini.system.paths import home_expanded


@dataclass(frozen=True)
class Base:
    """A base model by name: a hub id, a folder, a .gguf file, or `smollm2`. Nothing is read before it is needed.

    setting: the key of the configuration that holds the name, for messages.
    """

    name: str
    setting: str = "model.base"

    @cached_property
    def place(self) -> tuple[str, dict[str, Any]]:
        """Arguments of transformers' from_pretrained: a folder or a hub id, and options, such as gguf_file."""
        path = local_path(self.name, self.setting)
        if path is None:
            return self.name, {} if reachable() else {"local_files_only": True}
        return (str(path), {}) if path.is_dir() else (str(path.parent), {"gguf_file": path.name})

    @property
    def where(self) -> str:
        """The setting and its value."""
        return f"{self.setting}={self.name!r}"

    @cached_property
    def config(self) -> Any:
        """The base's configuration (transformers' PreTrainedConfig)."""
        from transformers import AutoConfig

        place, options = self.place
        return self._read(lambda: AutoConfig.from_pretrained(place, **options), "configuration")

    @cached_property
    def tokenizer(self) -> Any:
        """The base's tokenizer, a fast one of transformers."""
        from transformers import AutoTokenizer

        place, options = self.place
        found = self._read(lambda: AutoTokenizer.from_pretrained(place, **options), "tokenizer")
        if getattr(found, "backend_tokenizer", None) is None:
            raise InputError(f"{self.where}: its tokenizer has no fast version (tokenizer.json), which is needed")
        return found

    @cached_property
    def n_tokens(self) -> int:
        """One more than the largest id that text, its beginning and end, or the chat template can have. Some tokenizers
        have a special token beyond the embedding, as those of Gemma 3 for images."""
        tokenizer, ends = self.tokenizer, (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        unused = {
            number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and number not in ends and token.content not in str(tokenizer.chat_template)
        }
        return 1 + max(set(tokenizer.get_vocab().values()) - unused)

    def check_embedding(self, rows: int) -> None:
        """Raise InputError where the tokenizer has tokens beyond an embedding of so many rows."""
        if rows < self.n_tokens:
            raise InputError(f"{self.where}: its tokenizer has {self.n_tokens} tokens, its embedding {rows}")

    def backend_tokenizer(self) -> Any:
        """A copy of the `tokenizers.Tokenizer` inside."""
        return copy.deepcopy(self.tokenizer.backend_tokenizer)

    def sizes(self) -> dict[str, int | None]:
        """The base's sizes by the names of the group `dims`, without the segment length."""
        config = self.config
        try:
            heads = dict(zip(("n_heads", "n_kv_heads", "d_key"), heads_of(config), strict=True))
            sizes = {"d_model": config.hidden_size, "n_layers": config.num_hidden_layers, **heads}
            return sizes | {"d_value": None, "d_ff": config.intermediate_size}
        except AttributeError as error:
            raise InputError(f"{self.where}: {type(config).__name__} is not a language model that is known") from error

    def load(self, dtype: torch.dtype | str = torch.float32) -> Any:
        """The model in evaluation mode. dtype: of its weights, "auto" for the base's own; a GGUF file's are
        dequantised."""
        from transformers import AutoModelForCausalLM, GgufConfig

        # Makes folders that `infini inject` wrote known to transformers.
        import infini.pretrained.llm  # noqa: F401

        # First: without a network the model's other files are asked for again and again.
        _ = self.config
        place, options = self.place
        quantised = "gguf_file" in options
        if quantised:
            options = {**options, "quantization_config": GgufConfig(dequantize=True)}
        model = self._read(lambda: AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **options), "model")
        if quantised:
            # A dequantised model is an ordinary one; with these it could not be saved.
            for name in ("quantization_config", "_pre_quantization_dtype"):
                model.config.__dict__.pop(name, None)
            for name in ("is_quantized", "hf_quantizer", "quantization_method"):
                model.__dict__.pop(name, None)
            # The model card says this, because these are not the weights that the base's authors published.
            kind = f"4-bit GGUF of the package {_package()}" if self.name == SMOLLM2 else f"GGUF {Path(self.name).name}"
            model.config.base_weights = f"{kind}, dequantised"
        if self.name == SMOLLM2:
            model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
        return model.eval()

    def describe(self) -> dict[str, str]:
        """The base in a record: its name (the last part of a path), family and package."""
        name = Path(self.name).name if home_expanded(self.setting, self.name).exists() else self.name
        found = {"name": name, "family": str(self.config.model_type)}
        package = {"package": _package()} if self.name == SMOLLM2 else {}
        return found | package

    def _read(self, get: Any, what: str) -> Any:
        try:
            with _without_progress_bars():
                return get()
        except InputError:
            raise
        except Exception as error:  # every layer below (network, hub, file formats) raises its own kinds
            if isinstance(error, ImportError) and "gguf" in str(error):
                raise InputError(f"{self.where}: a GGUF file needs the package gguf: pip install gguf") from error
            place, options = self.place
            # What cannot be downloaded is an OSError; all else was read, and is wrong.
            if not isinstance(error, OSError) or "gguf_file" in options or Path(place).is_dir():
                # Some of transformers' messages end with a colon and an empty list.
                why = first_line(error).rstrip(": ")
                raise InputError(f"{self.where}: its {what} cannot be read ({why})") from error
            raise InputError(
                f"{self.where}: its {what} cannot be downloaded from the Hugging Face hub ({first_line(error)}), and "
                "no folder here has this name; "
                f"connect to a network, or name {ALLOWED}{did_you_mean(self.name, [SMOLLM2])}"
            ) from error


def _package() -> str:
    """The package of SMOLLM2 with its version."""
    return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers import modeling_gguf_pytorch_utils as gguf_utils
    from transformers.utils import logging

    shown, bar = logging.is_progress_bar_enabled(), gguf_utils.tqdm
    logging.disable_progress_bar()
    gguf_utils.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        gguf_utils.tqdm = bar
        if shown:
            logging.enable_progress_bar()
