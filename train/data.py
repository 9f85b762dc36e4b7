"""Token sequences with loss masks, fixed-length batches, resumable order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """One document: token ids and which of them the drafter is trained to predict."""

    tokens: np.ndarray
    loss_mask: np.ndarray

    def __post_init__(self) -> None:
        """Refuse a mask of another length than the tokens."""
        if self.tokens.shape != self.loss_mask.shape:
            raise ValueError(
                f"loss mask of shape {self.loss_mask.shape} for tokens of {self.tokens.shape}"
            )


def supervised_answer(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> TokenSequence:
    """A prompt and its answer, end-of-turn token included; exactly the answer is supervised."""
    tokens = np.asarray([*prompt_ids, *answer_ids], dtype=np.int32)
    return TokenSequence(tokens, np.arange(len(tokens)) >= len(prompt_ids))


@dataclasses.dataclass(frozen=True)
class TokenDataset:
    """Documents laid end to end; ``offsets[i] : offsets[i + 1]`` is document i."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    manifest: dict[str, Any]

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], manifest: dict[str, Any]) -> TokenDataset:
        """Documents in the order given, and what is known of them all."""
        lengths = [len(sequence.tokens) for sequence in sequences]
        return cls(
            np.concatenate([np.empty(0, np.int32), *(one.tokens for one in sequences)]),
            np.concatenate([np.empty(0, bool), *(one.loss_mask for one in sequences)]),
            np.cumsum([0, *lengths], dtype=np.int64),
            manifest,
        )

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> TokenSequence:
        """Document ``index``."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return TokenSequence(self.tokens[span], self.loss_mask[span])

    @property
    def fingerprint(self) -> dict[str, int]:
        """Counts that change when documents are added, removed or altered in length or mask."""
        return {
            "documents": len(self),
            "tokens": int(self.offsets[-1]),
            "supervised": int(self.loss_mask.sum()),
        }


def join(datasets: Sequence[TokenDataset]) -> TokenDataset:
    """Several datasets as one; they must come from the same target and chat template."""
    first = datasets[0].manifest
    for other in datasets[1:]:
        for key in ("target", "template_sha256", "thinking"):
            if other.manifest.get(key) != first.get(key):
                raise ValueError(
                    f"data with {key} = {first.get(key)!r} and {other.manifest.get(key)!r} "
                    "cannot be mixed in one run"
                )
    documents = [data[index] for data in datasets for index in range(len(data))]
    return TokenDataset.of(documents, first)


def fit_to_length(dataset: TokenDataset, length: int, minimum_supervised: int) -> TokenDataset:
    """Cut documents at ``length`` tokens; drop those with too few supervised ones left.

    Raises:
        ValueError: nothing is left.
    """
    kept = []
    for document in (dataset[index] for index in range(len(dataset))):
        if document.loss_mask[:length].sum() >= minimum_supervised:
            kept.append(TokenSequence(document.tokens[:length], document.loss_mask[:length]))
    if not kept:
        raise ValueError(
            f"none of {len(dataset)} documents has {minimum_supervised} supervised tokens "
            f"within its first {length}"
        )
    return TokenDataset.of(kept, dataset.manifest)


@dataclasses.dataclass(frozen=True)
class _PadToLength(grain.transforms.Map):
    """Every array of a document as a row of a batch, zeros at its end."""

    length: int

    def map(self, element: Any) -> dict[str, np.ndarray]:
        row = {}
        for field in dataclasses.fields(element):
            values = getattr(element, field.name)
            row[field.name] = np.zeros((self.length, *values.shape[1:]), values.dtype)
            row[field.name][: len(values)] = values
        return row


def shuffled_batches(
    dataset: grain.sources.RandomAccessDataSource, *, batch_size: int, length: int, seed: int
) -> grain.DatasetIterator:
    """Endless batches ``{"tokens", "loss_mask"}`` of ``[batch_size, length]``, a document a row.

    Documents of a feature cache bring ``taps`` and ``last_hidden`` as well.

    Every epoch is a fresh shuffle fixed by the seed and the epoch's index; what does not fill
    a batch is left out of that epoch. ``get_state`` and ``set_state`` (a small dict) fix the
    position.

    Raises:
        ValueError: fewer documents than one batch.
    """
    if len(dataset) < batch_size:
        raise ValueError(f"{len(dataset)} documents do not fill one batch of {batch_size}")
    batches = (
        grain.MapDataset.source(dataset)
        .seed(seed)
        .shuffle()
        .map(_PadToLength(length))
        .batch(batch_size, drop_remainder=True)
        .repeat()
    )
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(batches.to_iter_dataset(options))


def sequential_batches(
    dataset: TokenDataset, *, batch_size: int, length: int
) -> Iterator[dict[str, np.ndarray]]:
    """Every document once, in order; the last batch is filled with unsupervised rows."""
    pad = _PadToLength(length)
    for start in range(0, len(dataset), batch_size):
        rows = [pad.map(dataset[i]) for i in range(start, min(start + batch_size, len(dataset)))]
        missing = batch_size - len(rows)
        yield {
            name: np.pad(np.stack([row[name] for row in rows]), ((0, missing), (0, 0)))
            for name in ("tokens", "loss_mask")
        }
