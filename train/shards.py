"""Documents on disk: array-record shards that are complete or absent, and what they hold."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from train.data import TokenDataset, TokenSequence

MANIFEST = "manifest.json"
FORMAT = "array_record: int32 tokens, then uint8 loss mask, little endian; a document a record"
TOKEN_BYTES = 5


def write_manifest(folder: Path, manifest: dict[str, Any], *, resume: bool = False) -> None:
    """Write what the data is, or check that a resumed job is the one that began the folder.

    ``versions`` may differ between attempts: those of the first are kept.

    Raises:
        FileExistsError: a new job in a folder that holds data.
        FileNotFoundError: nothing to resume.
        ValueError: a resumed job that differs; the message names the key.
    """
    path = folder / MANIFEST
    if not path.exists():
        if resume:
            raise FileNotFoundError(f"nothing to resume: {path} does not exist")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())
        return
    if not resume:
        raise FileExistsError(
            f"{folder} holds data already: continue it with --resume, or choose another output "
            "folder"
        )
    found = json.loads(path.read_text())
    wanted = json.loads(json.dumps(manifest))
    for key in sorted({*found, *wanted} - {"versions"}):
        if found.get(key) != wanted.get(key):
            raise ValueError(
                f"{folder} holds data with {key} = {found.get(key)!r}, this job has "
                f"{wanted.get(key)!r}: choose another output folder"
            )


def shard_path(folder: Path, index: int) -> Path:
    """File of shard ``index``; it exists only when the shard is complete."""
    return folder / f"shard-{index:05d}.array_record"


def write_shard(folder: Path, index: int, sequences: Sequence[TokenSequence]) -> None:
    """Write one shard at once: a crash leaves no shard or a complete one."""
    path = shard_path(folder, index)
    temporary = path.with_suffix(".partial")
    # One record a group: readers that pick single documents need no others.
    writer = ArrayRecordWriter(str(temporary), "group_size:1")
    try:
        for sequence in sequences:
            tokens = np.asarray(sequence.tokens, "<i4")
            writer.write(tokens.tobytes() + np.asarray(sequence.loss_mask, np.uint8).tobytes())
    finally:
        writer.close()
    os.replace(temporary, path)


def digest(content: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(content.encode()).hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is complete or as it was before."""
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def read_dataset(folder: Path) -> TokenDataset:
    """All complete shards of a folder, in order; ``.npz`` shards of older folders are read too.

    Raises:
        FileNotFoundError: the folder has no manifest or no shard.
        ValueError: a shard that is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} is no data folder: it has no {MANIFEST}; make one with "
            "dspark data CONFIG.toml"
        )
    shards = sorted([*folder.glob("shard-*.array_record"), *folder.glob("shard-*.npz")])
    if not shards:
        raise FileNotFoundError(f"{folder} holds no complete shard: build the data first")
    sequences = [sequence for shard in shards for sequence in _read_shard(shard)]
    return TokenDataset.of(sequences, json.loads(path.read_text()))


def _read_shard(path: Path) -> list[TokenSequence]:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            tokens, mask, offsets = arrays["tokens"], arrays["loss_mask"], arrays["offsets"]
        spans = itertools.pairwise(offsets)
        return [TokenSequence(tokens[start:end], mask[start:end]) for start, end in spans]
    try:
        reader = ArrayRecordReader(str(path))
        records = reader.read_all() if reader.num_records() else []
        reader.close()
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"{path} is no readable shard: {error}") from error
    return [_sequence(record, path) for record in records]


def _sequence(record: bytes, path: Path) -> TokenSequence:
    length, rest = divmod(len(record), TOKEN_BYTES)
    if rest:
        raise ValueError(
            f"{path} holds a record of {len(record)} bytes; a document has {TOKEN_BYTES} a token"
        )
    return TokenSequence(
        np.frombuffer(record, "<i4", length),
        np.frombuffer(record, np.uint8, offset=4 * length).astype(bool),
    )
