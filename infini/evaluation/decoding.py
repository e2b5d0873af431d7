"""Decoding: a prompt of any length is streamed into a state, then one token at a time is drawn and read.

What a model knows of its prompt is its state and the last token, which it has not read yet: a `Reader` holds both, can
be saved, loaded and forked, and costs the same memory whatever it has read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch

from infini.errors import InputError
from infini.nn.state import State, filled, fork, stored_leaves
from infini.nn.tensor_file import read_tensors, write_tensors


@dataclass(frozen=True)
class Reader:
    """A model in the middle of one text. Reading gives a new Reader; this one stays as it is."""

    model: Any
    state: State
    last: int
    """The token that comes next: known, not read yet."""

    @classmethod
    def begin(cls, model: Any, bos_id: int) -> Reader:
        """Nothing has been read; bos_id: the token before the first one of a document."""
        return cls(model, model.init_state(1), bos_id)

    @torch.no_grad()
    def read(
        self, chunks: Iterable[np.ndarray], tokens_per_call: int, advance: Callable[[int], None] = lambda tokens: None
    ) -> Reader:
        """Go on with these tokens, in pieces of any size; advance is told of tokens as they are read."""
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
        return torch.from_numpy(ids)[None].to(self.state.clock.slot_B.device)

    def fork(self) -> Reader:
        """A copy that shares no tensor with this one."""
        return replace(self, state=fork(self.state))


def logits_of(model: Any, hidden_BD: torch.Tensor) -> torch.Tensor:
    """float32 logits [B, vocabulary], products in the weights' own format: in bfloat16 two tokens may tie."""
    with torch.autocast(hidden_BD.device.type, enabled=False):
        logits: torch.Tensor = model.head(hidden_BD.to(model.output_weight.dtype))
    return logits.float()


class SamplerState(Protocol):
    """What tokens can be drawn from: a Reader, or another frozen dataclass with these fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def state(self) -> Any: ...
    @property
    def last(self) -> int: ...
    def next_logits(self) -> tuple[torch.Tensor, Any]: ...


D = TypeVar("D", bound=SamplerState)


def generate(
    reader: D, max_new_tokens: int, temperature: float, top_p: float, generator: torch.Generator, end: int
) -> Iterator[tuple[int, D]]:
    """Draw tokens until `end` is drawn (it is not given) or there are max_new_tokens, each with the Reader after it.

    temperature: logits are divided by it; 0 takes the likeliest token. top_p: only the likeliest tokens whose
    probabilities, the last one's included, first reach it. generator: a CPU generator; its seed decides the draws.
    """
    for _ in range(max_new_tokens):
        logits, state = reader.next_logits()
        token = draw(logits, temperature, top_p, generator)
        if token == end:
            return
        reader = replace(reader, state=state, last=token)
        yield token, reader


def draw(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """A token by nucleus sampling from float32 logits [vocabulary]; see generate.

    Raises InputError for logits of which none is the largest: a NaN is among them, or an infinity.
    """
    logits = logits.cpu()
    if not bool(torch.isfinite(logits.max())):
        raise InputError("checkpoint: the model's outputs are not finite, so no token can be drawn; take another one")
    if temperature == 0:
        return int(logits.argmax())
    # The largest at 0, so that no temperature overflows.
    scaled = (logits - logits.max()) / max(temperature, 1e-30)
    probabilities, tokens = torch.softmax(scaled, 0).sort(descending=True, stable=True)
    # The likeliest token always stays: before it nothing has been summed.
    kept = probabilities.cumsum(0) - probabilities < top_p
    return int(tokens[kept][torch.multinomial(probabilities[kept], 1, generator=generator)])


def save_reader(reader: Reader, path: Path, about: dict[str, str]) -> None:
    """Write state and last token as safetensors, whole or not at all. about: what load_reader must find again, as the
    model's run id."""
    write_tensors(path, {**stored_leaves(reader.state), "last": torch.tensor([reader.last])}, about)


def saved_by(path: Path) -> str | None:
    """The run id of the model that a file of save_reader is of; None for what is no such file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return (file.metadata() or {}).get("model")
    except (OSError, ValueError, SafetensorError):
        return None  # load_reader says what is wrong with it


def load_reader(path: Path, model: Any, about: dict[str, str]) -> Reader:
    """Read what save_reader wrote.

    Raises InputError when the file cannot be read, is damaged, or was made by another model or tokenizer than `about`
    says.
    """
    where = f"load_state={str(path)!r}"
    try:
        tensors, found = read_tensors(path)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    for key, value in about.items():
        if found.get(key) != value:
            hint = f"; checkpoint={found[key]} takes it" if key == "model" and key in found else ""
            raise InputError(f"{where}: its {key} is {found.get(key)!r}, this model's is {value!r}{hint}")
    last = int(tensors.pop("last"))
    try:
        return Reader(model, filled(model.init_state(1), tensors), last)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
