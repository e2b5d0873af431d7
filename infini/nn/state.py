"""Generic functions over state trees: detach, move, select rows, save, load and measure, written once for every model.

A state is a tree of NamedTuples, tuples and tensors, every tensor with the row (batch) dimension first. It goes into a
call and comes out of it; modules never keep it. Leaves below a field called `memory` are what the paper's Table 1
counts; the others are the window of the unfinished segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

Tree = TypeVar("Tree")


class Clock(NamedTuple):
    """Where each row stands.

    position_B: int64, tokens since the row's last reset.
    slot_B: int64, tokens in the row's unfinished segment, in [0, segment_length).
    weight_BN: float32 (float64 in float64), write weights of the unfinished segment's tokens, 0 beyond slot_B.
    """

    position_B: torch.Tensor
    slot_B: torch.Tensor
    weight_BN: torch.Tensor


class State(NamedTuple):
    """A language model's state: its clock and the leaves of every layer."""

    clock: Clock
    layers: tuple[Any, ...]


def map_state(function: Callable[..., torch.Tensor], tree: Tree, *others: Tree) -> Tree:
    """The tree of function(leaf, leaf of the others, ...)."""
    if isinstance(tree, torch.Tensor):
        return function(tree, *others)  # type: ignore[return-value]
    children = [map_state(function, *branches) for branches in zip(tree, *others, strict=True)]  # type: ignore[call-overload]
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)  # type: ignore[call-arg]


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted path, tensor) for every leaf, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
        return
    for name, child in zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True):
        yield from leaves(child, f"{path}.{name}" if path else str(name))


def detach(tree: Tree) -> Tree:
    """The same values without their history."""
    return map_state(torch.Tensor.detach, tree)


def fork(tree: Tree) -> Tree:
    """A copy that shares nothing."""
    return map_state(torch.Tensor.clone, tree)


def move(tree: Tree, device: torch.device | str) -> Tree:
    """The tree on another device."""
    return map_state(lambda leaf: leaf.to(device), tree)


def select_rows(tree: Tree, rows_B: torch.Tensor) -> Tree:
    """The rows named, in that order."""
    return map_state(lambda leaf: leaf[rows_B.to(leaf.device)], tree)


def place_rows(tree: Tree, rows_B: torch.Tensor, part: Tree) -> Tree:
    """The tree with the rows named taken from `part`; differentiable in both."""
    return map_state(lambda leaf, new: leaf.index_copy(0, rows_B.to(leaf.device), new.to(leaf.dtype)), tree, part)


def reset_rows(tree: Tree, rows_B: torch.Tensor) -> Tree:
    """The tree with the rows where rows_B (bool) is true forgotten: every leaf starts at zero."""
    return map_state(lambda leaf: leaf.masked_fill(rows_B.to(leaf.device).view(-1, *[1] * (leaf.dim() - 1)), 0), tree)


def is_memory(path: str) -> bool:
    """Whether a leaf's path lies below a field called `memory`."""
    return "memory" in path.split(".")


def scale_memory(tree: Tree, factor_B: torch.Tensor) -> Tree:
    """The tree with each row's sums over tokens multiplied by a number of its own, as if every token of the row had
    written so many times as much; differentiable.

    Sums are the leaves of NamedTuples that say so, by a property `is_a_sum`. Caches, and all else that
    tokens replace instead of add to, stay as they are.
    """
    if isinstance(tree, torch.Tensor):
        return tree
    if getattr(tree, "is_a_sum", False):
        return map_state(lambda leaf: leaf * factor_B.to(leaf).view(-1, *[1] * (leaf.dim() - 1)), tree)
    children = [scale_memory(child, factor_B) for child in tree]  # type: ignore[attr-defined]
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)  # type: ignore[call-arg]


def memory_floats(tree: Any) -> int:
    """Numbers a row carries in its memory leaves: what the paper's Table 1 counts."""
    return sum(leaf[0].numel() for path, leaf in leaves(tree) if is_memory(path))


def state_bytes(tree: Any) -> int:
    """Bytes of all leaves."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(tree))


def stored_leaves(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Dotted path behind the prefix -> a tensor that can be written: contiguous, without history, on the CPU."""
    return {prefix + name: leaf.detach().cpu().contiguous() for name, leaf in leaves(tree)}


def filled(like: Tree, stored: dict[str, torch.Tensor], prefix: str = "") -> Tree:
    """What stored_leaves gave, in the shape of `like` (a fresh state of the same model and batch size).

    prefix: of the leaves among others. Raises ValueError when these are not the leaves of such a state.
    """
    stored = {name.removeprefix(prefix): leaf for name, leaf in stored.items() if name.startswith(prefix)}
    wanted = {name: tuple(leaf.shape) for name, leaf in leaves(like)}
    if wanted != {name: tuple(leaf.shape) for name, leaf in stored.items()}:
        raise ValueError("not a state of this model, segment length and batch size")
    loaded = iter([stored[name] for name in wanted])
    return map_state(lambda leaf: next(loaded).to(leaf.device, leaf.dtype), like)


def save_state(tree: Any, path: str | Path) -> None:
    """Write every leaf to a safetensors file."""
    from safetensors.torch import save_file

    save_file(stored_leaves(tree), str(path))


def load_state(like: Tree, path: str | Path) -> Tree:
    """Read what save_state wrote into the shape of `like`; ValueError when the file's leaves are not those of one."""
    from safetensors.torch import load_file

    try:
        return filled(like, load_file(str(path)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
