"""Decoding: a prompt of any length is streamed into a state, then tokens are sampled and read one at a time.

A `Reader` holds a model's state and the last token, which the model has not read yet. It can be saved, loaded and
forked, and its size does not depend on the length of the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infini.errors import InputError
from infini.nn.host import to_device, to_numpy
from infini.nn.ops.dtypes import without_autocast
from infini.nn.state import State, filled, fork, stored_leaves
from infini.nn.tensor_file import read_tensors, write_tensors


@dataclass(frozen=True)
class Reader:
    """A model and its state within one text. Immutable: reading returns a new Reader."""

    model: Any
    state: State
    last: int
    """The next token: known, but not read yet."""

    @classmethod
    def begin(cls, model: Any, bos_id: int) -> Reader:
        """A Reader before the first token. bos_id: the beginning-of-document token."""
        return cls(model, model.init_state(1), bos_id)

    @torch.no_grad()
    def read(
        self, chunks: Iterable[np.ndarray], tokens_per_call: int, advance: Callable[[int], None] = lambda tokens: None
    ) -> Reader:
        """Read these tokens, in chunks of any size; advance is called with the number of tokens read."""
        reader = self
        for chunk in chunks:
            for start in range(0, len(chunk), tokens_per_call):
                part = np.concatenate([[reader.last], chunk[start : start + tokens_per_call]]).astype(np.int64)
                state = self.model.prefill(self._ids(part[:-1]), reader.state)
                reader = replace(reader, state=state, last=int(part[-1]))
                advance(len(part) - 1)
        return reader

    @torch.no_grad()
    def next_logits(self) -> tuple[torch.Tensor, State]:
        """float32 logits [vocabulary] of the token after `last`, and the state that has read `last`."""
        out = self.model(self._ids(np.array([self.last])), self.state)
        return logits_of(self.model, out.hidden_BTD[:, -1])[0], out.state

    def _ids(self, ids: np.ndarray) -> torch.Tensor:
        return to_device(ids[None], self.model.output_weight.device)

    def fork(self) -> Reader:
        """A copy that shares no tensor with this one."""
        return replace(self, state=fork(self.state))


def logits_of(model: Any, hidden_BD: torch.Tensor) -> torch.Tensor:
    """float32 logits [B, vocabulary], computed in the format of the weights: in bfloat16 two tokens may tie."""
    with without_autocast(hidden_BD):
        logits: torch.Tensor = model.head(hidden_BD.to(model.output_weight.dtype))
    return logits.float()


def generate(
    reader: Any, max_new_tokens: int, temperature: float, top_p: float, generator: torch.Generator, ends: Container[int]
) -> Iterator[tuple[int, Any]]:
    """Sample tokens until one of `ends` (not returned) or max_new_tokens; yields each with the Reader after it.

    reader: a Reader, or another frozen dataclass with `state`, `last` and `next_logits`. temperature: divides the
    logits; 0 is greedy. top_p: only the likeliest tokens, up to and including the one with which their probabilities
    reach it. generator: a CPU generator.
    """
    for _ in range(max_new_tokens):
        logits, state = reader.next_logits()
        token = sample_token(logits, temperature, top_p, generator)
        if token in ends:
            return
        reader = replace(reader, state=state, last=token)
        yield token, reader


def sample_token(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """A token by nucleus sampling from float32 logits [vocabulary]; see generate.

    Raises InputError for logits with NaN or infinity.
    """
    # The only read of the device: all that follows is on the host.
    values = to_numpy(logits)
    if not np.isfinite(values.max()):
        raise InputError("checkpoint: the model's outputs are not finite, so no token can be sampled; use another one")
    if temperature == 0:
        return int(values.argmax())
    logits = torch.from_numpy(values)
    # Shifted to a maximum of 0, so that no temperature overflows.
    scaled = (logits - logits.max()) / max(temperature, 1e-30)
    probabilities, tokens = torch.softmax(scaled, 0).sort(descending=True, stable=True)
    # The sum before the likeliest token is 0, so it is always kept.
    kept = probabilities.cumsum(0) - probabilities < top_p
    place = np.flatnonzero(kept.numpy())
    found = torch.multinomial(probabilities[torch.from_numpy(place)], 1, generator=generator)
    return int(tokens.numpy()[place][found.numpy()[0]])


def fingerprint(model: Any) -> str:
    """Hexadecimal digest of the first and last numbers of every parameter, which tells apart models of one name."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        flat = parameter.detach().flatten()
        digest.update(torch.cat([flat[:8], flat[-8:]]).float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def save_reader(reader: Reader, path: Path, about: dict[str, str]) -> None:
    """Write state and last token as safetensors, atomically. about: metadata that load_reader must find again, as the
    model's run id."""
    write_tensors(path, {**stored_leaves(reader.state), "last": torch.tensor([reader.last])}, about)


def saved_by(path: Path) -> str | None:
    """The run id of the model in a file of save_reader; None for other files."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return (file.metadata() or {}).get("model")
    except (OSError, ValueError, SafetensorError):
        return None  # load_reader reports the error


def load_reader(path: Path, model: Any, about: dict[str, str]) -> Reader:
    """Load a saved Reader.

    Raises InputError when the file cannot be read, is damaged, or has another model, tokenizer or weights than `about`.
    """
    where = f"load_state={str(path)!r}"
    try:
        tensors, found = read_tensors(path)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    for key, value in about.items():
        if found.get(key) != value:
            if key == "weights":
                raise InputError(f"{where}: was saved by a model with other weights; read the prompt again")
            hint = f"; it belongs to checkpoint={found[key]}" if key == "model" and key in found else ""
            raise InputError(f"{where}: its {key} is {found.get(key)!r}, this model's is {value!r}{hint}")
    last = int(tensors.pop("last"))
    try:
        return Reader(model, filled(model.init_state(1), tensors), last)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
