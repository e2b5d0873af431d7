"""States of layers and models, and generic functions over them: detach, move, select rows, save, load and measure.

A state is a tree of NamedTuples, tuples and tensors. Every tensor has the row (batch) dimension first. A call takes a
state and returns the next one; modules never keep it. Leaves below a field called `memory` are the numbers that the
paper's Table 1 counts; the others are the window of the unfinished segment.

The clock, and counters (integer leaves), are CPU tensors whatever device a model is on: calls are planned with them on
the host (infini.nn.host). All other leaves are on the model's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from infini.nn.host import on_each_device, to_device

Tree = TypeVar("Tree")
Kind = TypeVar("Kind", bound=type)


def state_class(kind: Kind) -> Kind:
    """Class decorator of the NamedTuples in a state: torch.load(weights_only=True) accepts them."""
    torch.serialization.add_safe_globals([kind])
    return kind


@state_class
class Clock(NamedTuple):
    """The position of each row in its document. All tensors are on the host.

    position_B: int64, tokens since the row's last reset.
    slot_B: int64, tokens in the row's unfinished segment, in [0, segment_length).
    weight_BN: float32 (float64 in float64), write weights of the unfinished segment's tokens, 0 beyond slot_B.
    slot: slot_B as one number if all rows are known to agree on it, otherwise None. torch.compile makes a graph for
        each. Functions that change leaves drop it (map_state), so that it never contradicts slot_B.
    """

    position_B: Tensor
    slot_B: Tensor
    weight_BN: Tensor
    slot: int | None = None

    def on_host(self) -> Clock:
        """The same clock, or a copy of one on a device, where torch.load puts the clock of an older version's state."""
        if all(x.device.type == "cpu" for x in self[:3]):
            return self
        return self._replace(**{name: getattr(self, name).cpu() for name in self._fields[:3]})


@state_class
class State(NamedTuple):
    """The state of a layer or a model: a clock, and the leaves of every layer.

    A call returns it with the history of its gradients. Training over successive chunks of a document cuts that
    history between the chunks:

        y, state = layer(chunk, state)
        loss(y).backward()
        state = state.detach()
    """

    clock: Clock
    layers: tuple[Any, ...]

    def detach(self) -> State:
        """The same values without gradient history. They share memory with this state."""
        mapped = map_state(torch.Tensor.detach, self)
        return State(mapped.clock._replace(slot=self.clock.slot), mapped.layers)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return state_bytes(self)

    def __repr__(self) -> str:
        """Says how many tokens each row has read, and how large the state is, but not its numbers."""
        read = str(self.clock.position_B.tolist()) if self.clock.position_B.device.type == "cpu" else "unknown numbers"
        size = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}, {self.nbytes():,} bytes"
        return f"State(rows that have read {read} tokens, {size})"

    def to(self, device: torch.device | str) -> State:
        """The state on another device. Its clock and its counters stay on the host."""
        return State(self.clock.on_host(), move(self.layers, device))


def map_state(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """The tree of function(leaf, leaf of the others, ...). Clock.slot becomes None."""
    if isinstance(tree, Tensor):
        return function(tree, *others)  # type: ignore[return-value]
    if tree is None or isinstance(tree, int):
        return None  # type: ignore[return-value]
    children = [map_state(function, *branches) for branches in zip(tree, *others, strict=True)]  # type: ignore[call-overload]
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)  # type: ignore[call-arg]


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted path, tensor) of every leaf, in a fixed order."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif tree is not None and not isinstance(tree, int):
        for name, child in zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True):
            yield from leaves(child, f"{path}.{name}" if path else str(name))


def detach(tree: Tree) -> Tree:
    """The same values without gradient history."""
    return map_state(torch.Tensor.detach, tree)


def fork(tree: Tree) -> Tree:
    """A copy that shares no memory with the tree."""
    return map_state(torch.Tensor.clone, tree)


def move(tree: Tree, device: torch.device | str) -> Tree:
    """The tree on another device; the clock and counters stay on the host."""
    if isinstance(tree, State):
        return tree.to(device)  # type: ignore[return-value]
    return map_state(lambda leaf: leaf.to(device) if leaf.is_floating_point() else leaf, tree)


def select_rows(tree: Tree, rows_B: Tensor) -> Tree:
    """The tree with only these rows, in this order. rows_B: int64, on the host (on a device it is read)."""
    rows = on_each_device(rows_B)
    return map_state(lambda leaf: leaf[rows(leaf.device)], tree)


def place_rows(tree: Tree, rows_B: Tensor, part: Tree) -> Tree:
    """The tree with these rows replaced by the rows of `part`. Differentiable in both. rows_B: as for select_rows."""
    rows = on_each_device(rows_B)
    return map_state(lambda leaf, new: leaf.index_copy(0, rows(leaf.device), new.to(leaf.dtype)), tree, part)


def join_rows(*parts_B: Tensor) -> Tensor:
    """The rows of a leaf of several states, one part below the other.

    Keys and values of everything that was read [B, G, C, K] have the columns C of their longest row, its last token at
    the end: other parts get zeros before theirs.
    """
    columns = [part.shape[2] if part.dim() == 4 else 0 for part in parts_B]
    if len(set(columns)) > 1:
        parts_B = tuple(F.pad(part, (0, 0, max(columns) - n, 0)) for part, n in zip(parts_B, columns, strict=True))
    return torch.cat(parts_B)


def reset_rows(tree: Tree, rows_B: Tensor) -> Tree:
    """The tree with all leaves set to 0, their initial value, in the rows for which rows_B (bool) is true.

    rows_B: as for select_rows.
    """
    rows = on_each_device(rows_B)
    return map_state(lambda leaf: leaf.masked_fill(rows(leaf.device).view(-1, *[1] * (leaf.dim() - 1)), 0), tree)


def is_memory(path: str) -> bool:
    """Whether a leaf's path lies below a field called `memory`."""
    return "memory" in path.split(".")


def scale_memory(tree: Tree, factor_B: Tensor) -> Tree:
    """The state with the compressive memory of each row, M and z, multiplied by that row's factor. Differentiable.

    The result is the state after every token of the row has written `factor` times as much. Later tokens then weigh
    less against the past. Length extension uses this in training. The window of the unfinished segment, caches and
    clocks do not change. Memories that are not sums over tokens (`is_a_sum` is not true) do not change either.

    tree: a state, or a part of one. factor_B: [B], above 0, on any device. Returns a new tree; the given one is
    unchanged. Example: state = scale_memory(state, torch.full((batch_size,), 1000.0)).
    """
    if tree is None or isinstance(tree, Tensor | int):
        return tree
    if getattr(tree, "is_a_sum", False):
        return map_state(
            lambda leaf: leaf * to_device(factor_B.to(leaf.dtype), leaf.device).view(-1, *[1] * (leaf.dim() - 1)), tree
        )
    children = [scale_memory(child, factor_B) for child in tree]  # type: ignore[attr-defined]
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)  # type: ignore[call-arg]


def memory_floats(tree: Any) -> int:
    """Numbers per row in the memory leaves: the count of the paper's Table 1."""
    return sum(leaf[0].numel() for path, leaf in leaves(tree) if is_memory(path))


def state_bytes(tree: Any) -> int:
    """Bytes of all leaves."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(tree))


def difference(given: Mapping[str, Tensor], mine: Mapping[str, Tensor], first: int = 0) -> str:
    """The first leaf whose sizes are not those of mine, from dimension `first` on; empty where there is none.

    Both map paths of leaves to leaves. A size of 0 in mine, a fresh state, grows with what is read, and fits any.
    """
    for path in [*mine, *given]:
        there, here = (list(of[path].shape[first:]) if path in of else "missing" for of in (given, mine))
        # A missing leaf fits none: its letters are no sizes.
        if len(there) != len(here) or any(size not in (0, n) for n, size in zip(there, here, strict=True)):
            return f"{path} is {there}, here {here}"
    return ""


def stored_leaves(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """Prefix and dotted path -> a tensor that can be written to a file: contiguous, detached, on the CPU."""
    return {prefix + name: leaf.detach().cpu().contiguous() for name, leaf in leaves(tree)}


def filled(like: Tree, stored: dict[str, Tensor], prefix: str = "") -> Tree:
    """The tree with the structure of `like` and the tensors that stored_leaves returned.

    like: a fresh state of the same model and batch size. prefix: selects the tensors of this tree among others. Raises
    ValueError if names or shapes differ from those of `like`.
    """
    stored = {name.removeprefix(prefix): leaf for name, leaf in stored.items() if name.startswith(prefix)}
    wanted = dict(leaves(like))
    rows = [len(next(iter(tree.values()))) if tree else 0 for tree in (stored, wanted)]
    if stored.keys() == wanted.keys() and rows[0] != rows[1]:
        raise ValueError(f"not a state of this batch size: it has {rows[0]} rows, here are {rows[1]}")
    if differs := difference(stored, wanted):
        raise ValueError(f"not a state of this model, segment length and batch size: {differs}")
    loaded = iter([stored[name] for name in wanted])
    return map_state(lambda leaf: next(loaded).to(leaf.device, leaf.dtype), like)


def save_state(state: Any, path: str | Path) -> None:
    """Write a state to a file: its tensors by name, detached, on the CPU.

    The file is torch.save's. load_state reads it on any device. torch.save(state, path) works too; it also keeps the
    device, and torch.load reads it with weights_only=True, its default. Raises ValueError for what is no state.
    """
    stored = stored_leaves(state) if isinstance(state, tuple) else {}
    if not stored:
        raise ValueError(f"state is a {type(state).__name__}: it must be the second value that a call returned")
    torch.save({name: leaf.clone() for name, leaf in stored.items()}, path)


def load_state(like: Tree, path: str | Path) -> Tree:
    """Read a state that save_state wrote.

    like: a fresh state of the same layer or model and batch size, layer.init_state(batch_size); the result has its
    devices and dtypes. Raises ValueError if `like` is no state, or the file has none of these sizes.
    """
    if not isinstance(like, tuple):
        raise ValueError(
            f"like is a {type(like).__name__}: it must be a state, for example layer.init_state(batch_size)"
        )
    stored = torch.load(path, map_location="cpu", weights_only=True)
    try:
        if not isinstance(stored, dict) or not all(isinstance(leaf, Tensor) for leaf in stored.values()):
            raise ValueError("was not written by save_state")
        return filled(like, stored)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
