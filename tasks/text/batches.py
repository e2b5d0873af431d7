"""Batches of rows that start from an empty state. Evaluations use them too, so nothing here imports Lightning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infini.nn.ops.cross_entropy import IGNORE


def batch_of(rows: Sequence[tuple[np.ndarray, np.ndarray]], length: int, padding: int) -> dict[str, np.ndarray]:
    """ids_BT, targets_BT, mask_BT and reset_BT of rows of at most `length` tokens that start from an empty state.

    rows: token ids, and the targets of the last of them; the others have no target. padding: a token id.
    """
    ids_BT = np.full((len(rows), length), padding, dtype=np.int64)
    targets_BT = np.full_like(ids_BT, IGNORE)
    mask_BT = np.zeros(ids_BT.shape, dtype=bool)
    for row, (ids, targets) in enumerate(rows):
        ids_BT[row, : len(ids)], mask_BT[row, : len(ids)] = ids, True
        targets_BT[row, len(ids) - len(targets) : len(ids)] = targets
    return {"ids_BT": ids_BT, "targets_BT": targets_BT, "mask_BT": mask_BT, "reset_BT": np.zeros_like(mask_BT)}
