"""Tokenizers of the Hugging Face hub."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from infini.errors import InputError
from infini.tasks.text.documents import TextTokenizer
from infini.tasks.text.hub import caches_only, reachable


def hub_tokenizer(hub_id: str, setting: str = "scale.tokenizer", instead: str = "scale.tokenizer=bpe") -> TextTokenizer:
    """A tokenizer of the Hugging Face hub, by id; InputError (one line) when it cannot be loaded.

    setting, instead: the key that names it, and an alternative setting.
    """
    try:
        with nullcontext() if reachable() else caches_only():
            tokenizer = _of_hub(hub_id)
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"{setting}={hub_id!r}: its tokenizer could not be loaded from the Hugging Face hub "
            f"({type(error).__name__}); connect to a network, or use {instead}"
        ) from error
    return TextTokenizer(tokenizer)


def _of_hub(hub_id: str) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_pretrained(hub_id)
    except Exception:  # the library raises bare Exception
        # Older repositories have only vocabulary and merges, from which transformers builds a tokenizer.
        try:
            from transformers import AutoTokenizer
        except ImportError:
            pass
        else:
            return AutoTokenizer.from_pretrained(hub_id).backend_tokenizer
        raise
