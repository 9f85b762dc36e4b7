"""Token sequences with loss masks: shards on disk, fixed-length batches, resumable order."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

MANIFEST = "manifest.json"


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


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write what the data is; refuse to continue a folder that holds something else.

    ``versions`` may differ between attempts: those of the first are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MANIFEST
    if path.exists():
        found = json.loads(path.read_text())
        wanted = json.loads(json.dumps(manifest))
        compared = {*found, *wanted} - {"versions"}
        differing = [key for key in compared if found.get(key) != wanted.get(key)]
        if differing:
            key = sorted(differing)[0]
            raise ValueError(
                f"{folder} holds data with {key} = {found.get(key)!r}, this job has "
                f"{wanted.get(key)!r}: choose another output folder"
            )
        return
    _write_whole(path, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())


def shard_path(folder: Path, index: int) -> Path:
    """File of shard ``index``; it exists only when the shard is complete."""
    return folder / f"shard-{index:05d}.npz"


def write_shard(folder: Path, index: int, sequences: Sequence[TokenSequence]) -> None:
    """Write one shard at once: a crash leaves no shard or a complete one."""
    lengths = [len(sequence.tokens) for sequence in sequences]
    path = shard_path(folder, index)
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([np.empty(0, np.int32), *(s.tokens for s in sequences)]),
            loss_mask=np.concatenate([np.empty(0, bool), *(s.loss_mask for s in sequences)]),
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        )
    os.replace(temporary, path)


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def read_dataset(folder: Path) -> TokenDataset:
    """All complete shards of a folder, in order.

    Raises:
        FileNotFoundError: the folder has no manifest or no shard.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} is no data folder: it has no {MANIFEST}; "
            "make one with python -m train.answers CONFIG.toml"
        )
    shards = sorted(folder.glob("shard-*.npz"))
    if not shards:
        raise FileNotFoundError(f"{folder} holds no complete shard: build the data first")
    tokens, masks, ends = [], [], [np.zeros(1, np.int64)]
    for shard in shards:
        with np.load(shard) as arrays:
            tokens.append(arrays["tokens"])
            masks.append(arrays["loss_mask"])
            ends.append(arrays["offsets"][1:] + ends[-1][-1])
    return TokenDataset(
        np.concatenate(tokens),
        np.concatenate(masks),
        np.concatenate(ends),
        json.loads(path.read_text()),
    )


def join(datasets: Sequence[TokenDataset]) -> TokenDataset:
    """Several datasets as one; they must come from the same target and chat template."""
    first = datasets[0].manifest
    for other in datasets[1:]:
        for key in ("target", "template_sha256"):
            if other.manifest.get(key) != first.get(key):
                raise ValueError(
                    f"data with {key} = {first.get(key)!r} and {other.manifest.get(key)!r} "
                    "cannot be mixed in one run"
                )
    starts = np.cumsum([0, *(len(dataset.tokens) for dataset in datasets)])
    shifted = [data.offsets[1:] + start for data, start in zip(datasets, starts, strict=False)]
    return TokenDataset(
        np.concatenate([dataset.tokens for dataset in datasets]),
        np.concatenate([dataset.loss_mask for dataset in datasets]),
        np.concatenate([np.zeros(1, np.int64), *shifted]),
        first,
    )


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
    return TokenDataset(
        np.concatenate([document.tokens for document in kept]),
        np.concatenate([document.loss_mask for document in kept]),
        np.cumsum([0, *(len(document.tokens) for document in kept)], dtype=np.int64),
        dataset.manifest,
    )


@dataclasses.dataclass(frozen=True)
class _PadToLength(grain.transforms.Map):
    length: int

    def map(self, element: TokenSequence) -> dict[str, np.ndarray]:
        padding = (0, self.length - len(element.tokens))
        return {
            "tokens": np.pad(element.tokens, padding),
            "loss_mask": np.pad(element.loss_mask, padding),
        }


def shuffled_batches(
    dataset: TokenDataset, *, batch_size: int, length: int, seed: int
) -> grain.DatasetIterator:
    """Endless batches ``{"tokens", "loss_mask"}`` of ``[batch_size, length]``, a document a row.

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
