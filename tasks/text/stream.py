"""The training stream: batches in which every row follows its own document.

Letters: B rows, T tokens a row, S segments a row, N tokens a segment; T = S * N.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import IterableDataset

from infini.errors import InputError
from infini.nn.ops.cross_entropy import IGNORE
from infini.tasks.text.token_cache import TokenisedSplit


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


class DocumentStream(IterableDataset[dict[str, torch.Tensor]]):
    """An endless, deterministic iterator over training batches, for a DataLoader with `batch_size=None`.

    Each row reads one document from its first token to its last, sequence after sequence, then takes the next. The
    segment grid belongs to the document: its last segment is padded, so a document always begins on a segment
    boundary. Only the document a row begins with starts at a random sequence boundary inside it, so that a short
    training does not see beginnings only.

    Documents come in a new random order each epoch. If there are at least as many documents as rows, in each source of
    a mixture, no two rows read the same document at the same time. The batches depend on the arguments alone.

    excerpt_tokens: longer documents are cut into excerpts of exactly this length, the last of which overlaps the one
    before, and every excerpt counts as a document. A short training then sees many books instead of a few whole ones.

    parts: (documents, share) of each source of a mixture, by their numbers in the split. The next document is of the
    source whose tokens so far are the smallest multiple of its share. None: all documents are one source.

    A batch is a dict of tensors of shape [B, T]:
        ids_BT: int64, the model's input: `bos_id`, then the document's tokens without the last.
        targets_BT: int64, the token after each input token; -100 on padding.
        mask_BT: bool, True on a token, False on padding.
        reset_BT: bool, True where a row begins a document.
    """

    def __init__(
        self,
        split: TokenisedSplit,
        batch_size: int,
        segments_per_sequence: int,
        segment_length: int,
        bos_id: int,
        seed: int,
        excerpt_tokens: int | None = None,
        parts: Sequence[tuple[Sequence[int], float]] | None = None,
    ) -> None:
        """Raises InputError when the split has no documents, ValueError when a size is below 1."""
        if min(batch_size, segments_per_sequence, segment_length) < 1:
            raise ValueError("batch_size, segments_per_sequence and segment_length must be at least 1")
        if len(split) == 0:
            raise InputError(f"the {split.split} split of {split.name} has no documents to train on")
        self._texts: list[np.ndarray] = []
        self._parts: list[range] = []
        for documents, _ in parts or [(range(len(split)), 1.0)]:
            first = len(self._texts)
            self._texts += _excerpts([split.ids(index) for index in documents], excerpt_tokens)
            self._parts.append(range(first, len(self._texts)))
        self._shares = [share for _, share in parts or [((), 1.0)]]
        self._shape = (batch_size, segments_per_sequence, segment_length)
        self._bos_id = bos_id
        self._seed = seed
        self._begin()

    def _begin(self) -> None:
        self.batches = 0
        """Batches so far."""
        self._epochs = [-1] * len(self._parts)
        self._queues: list[list[int]] = [[] for _ in self._parts]
        self._taken = [0] * len(self._parts)
        # -1: the row has no document yet.
        batch_size, n_segments, segment_length = self._shape
        self._documents = [-1] * batch_size
        self._positions = [0] * batch_size
        self._fresh = [True] * batch_size
        rng = np.random.default_rng([self._seed, 0])
        for row in range(batch_size):
            document = self._next_document()
            sequences = -(-len(self._texts[document]) // (n_segments * segment_length))
            self._documents[row] = document
            self._positions[row] = int(rng.integers(sequences)) * n_segments * segment_length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The stream itself: a second iteration continues after the first."""
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch_size, n_segments, segment_length = self._shape
        # Padding is bos_id; any valid id would do, because the mask excludes it.
        ids_BT = np.full((batch_size, n_segments * segment_length), self._bos_id, dtype=np.int64)
        targets_BT = np.full_like(ids_BT, IGNORE)
        reset_BT = np.zeros(ids_BT.shape, dtype=bool)
        # Segment by segment across rows, so that rows take documents in the order in which they need them.
        for segment in range(n_segments):
            column = segment * segment_length
            for row in range(batch_size):
                tokens = self._texts[self._documents[row]]
                position = self._positions[row]
                target = tokens[position : position + segment_length]
                end = column + len(target)
                targets_BT[row, column:end] = target
                ids_BT[row, column + 1 : end] = target[:-1]
                if not self._fresh[row]:
                    ids_BT[row, column] = tokens[position - 1]
                reset_BT[row, column] = self._fresh[row]
                self._advance(row, len(tokens))
        self.batches += 1
        return {
            "ids_BT": torch.from_numpy(ids_BT),
            "targets_BT": torch.from_numpy(targets_BT),
            "mask_BT": torch.from_numpy(targets_BT != IGNORE),
            "reset_BT": torch.from_numpy(reset_BT),
        }

    def _advance(self, row: int, n_tokens: int) -> None:
        self._positions[row] += self._shape[2]
        self._fresh[row] = self._positions[row] >= n_tokens
        if self._fresh[row]:
            self._documents[row] = -1
            self._documents[row] = self._next_document()
            self._positions[row] = 0

    def _next_document(self) -> int:
        part = min(range(len(self._parts)), key=lambda part: self._taken[part] / self._shares[part])
        document = self._next_of(part)
        self._taken[part] += len(self._texts[document])
        return document

    def _next_of(self, part: int) -> int:
        busy, documents, queue = set(self._documents), self._parts[part], self._queues[part]
        while True:
            for place, document in enumerate(queue):
                if document not in busy or busy.issuperset(documents):
                    return queue.pop(place)
            self._epochs[part] += 1
            # A part's order does not depend on the parts behind it.
            seeds = [self._seed, 1, self._epochs[part], *([part] if part else [])]
            order = np.random.default_rng(seeds).permutation(len(documents)) + documents.start
            # Documents that an earlier epoch left in the queue are not queued twice, as those of one very long row.
            waiting = set(queue)
            queue.extend(document for document in order.tolist() if document not in waiting)

    def seek(self, batches: int) -> None:
        """Skip to the position after the first `batches` batches, without making them."""
        self._begin()
        batch_size, n_segments, _ = self._shape
        n_tokens = [len(text) for text in self._texts]
        for _ in range(batches * n_segments):
            for row in range(batch_size):
                self._advance(row, n_tokens[self._documents[row]])
        self.batches = batches


def _excerpts(texts: list[np.ndarray], longest: int | None) -> list[np.ndarray]:
    """Views of every document's tokens, in parts of exactly `longest` tokens where it has more."""
    if longest is None:
        return texts
    return [
        text[max(0, min(start, len(text) - longest)) :][:longest]
        for text in texts
        for start in range(0, max(len(text), 1), longest)
    ]
