"""A cache of target features on disk, in the layout of DeepSpec's target cache, version 2.

A folder holds ``manifest.json``, ``samples.idx`` and ``shard-00000.bin`` and so on. The index has
56 bytes a document, little endian: sample id u64, shard id u32, length u32, and the offsets (u64)
in the shard file of its ids (int32), attention mask (uint8), loss mask (uint8), taps (bf16
``[T, n*D]``, layers in ascending order) and last hidden states (bf16 ``[T, D]``, after the final
norm).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Int

from train.shards import write_whole

MANIFEST = "manifest.json"
INDEX = "samples.idx"
JOB = "job.json"
VERSION = 2
RECORD = np.dtype(
    [("sample", "<u8"), ("shard", "<u4"), ("length", "<u4"), ("offsets", "<u8", (5,))]
)
FIXED = {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8"}
REQUIRED = (
    "version",
    "num_samples",
    "num_shards",
    "target_layer_ids",
    "hidden_dtype",
    "token_dtype",
    "mask_dtype",
    "index_record_size",
    "hidden_size",
    "shards",
    "target_model_name_or_path",
)


@dataclasses.dataclass(frozen=True)
class CachedSequence:
    """One document with what the target said about it, features in bf16."""

    tokens: Int[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    taps: Float[np.ndarray, "T nD"]
    last_hidden: Float[np.ndarray, "T D"]


def bytes_a_token(hidden_size: int, taps: int) -> int:
    """Bytes of one token: id, two masks, taps and last hidden state."""
    return 6 + 2 * hidden_size * (taps + 1)


def cache_bytes(documents: int, tokens: int, hidden_size: int, taps: int) -> int:
    """Bytes of shards and index; the manifest is not counted."""
    return tokens * bytes_a_token(hidden_size, taps) + documents * RECORD.itemsize


def _offsets(start: int, length: int, hidden_size: int, taps: int) -> np.ndarray:
    """Where the five parts of a document begin, and where it ends: ``[6]``."""
    sizes = [4, 1, 1, 2 * taps * hidden_size, 2 * hidden_size]
    return start + length * np.cumsum([0, *sizes], dtype=np.uint64)


class CacheWriter:
    """Writes a cache, and continues one that was broken off: whole documents stay, nothing doubles.

    ``documents`` counts those on disk. The manifest appears with ``finish``; before that no reader
    takes the folder for a cache.
    """

    def __init__(
        self, folder: Path, facts: dict[str, Any], *, shard_bytes: int, resume: bool = False
    ) -> None:
        """Open ``folder``.

        Args:
            facts: what the cache is; goes into the manifest. ``hidden_size``,
                ``target_layer_ids`` and ``target_model_name_or_path`` must be in it.
            shard_bytes: most bytes of a shard file, if a document is not larger.
            resume: continue a folder.

        Raises:
            FileExistsError: a folder that holds something, without ``resume``.
            ValueError: a resumed folder of other facts.
        """
        self._folder, self._facts, self._shard_bytes = folder, facts, shard_bytes
        self._hidden, self._taps = facts["hidden_size"], len(facts["target_layer_ids"])
        job = folder / JOB
        if job.exists() and resume:
            self._check(json.loads(job.read_text()))
        elif folder.exists() and any(folder.iterdir()):
            raise FileExistsError(
                f"{folder} is not empty: continue its cache with --resume, or choose another "
                "features.output"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(job, (json.dumps(facts, indent=1) + "\n").encode())
        self._records = self._recover()
        self._index = (folder / INDEX).open("ab")
        self._shard: BinaryIO | None = None
        self._end = int(self._end_of(self._records[-1])) if len(self._records) else 0
        self.documents = len(self._records)

    def add(self, one: CachedSequence) -> None:
        """Append a document."""
        length = len(one.tokens)
        size = length * bytes_a_token(self._hidden, self._taps)
        number = int(self._records[-1]["shard"]) if len(self._records) else 0
        if self._end and self._end + size > self._shard_bytes:
            number, self._end = number + 1, 0
            self._close_shard()
        if self._shard is None:
            self._shard = (self._folder / shard_name(number)).open("ab")
        for values, dtype in (
            (one.tokens, "<i4"),
            (np.ones(length), np.uint8),
            (one.loss_mask, np.uint8),
            (one.taps, ml_dtypes.bfloat16),
            (one.last_hidden, ml_dtypes.bfloat16),
        ):
            self._shard.write(np.ascontiguousarray(values, dtype).tobytes())
        self._shard.flush()
        record = np.zeros(1, RECORD)
        record["sample"], record["shard"], record["length"] = self.documents, number, length
        bounds = _offsets(self._end, length, self._hidden, self._taps)
        record["offsets"][0], self._end = bounds[:5], int(bounds[5])
        # The index comes last: a document counts once all of it is there.
        self._index.write(record.tobytes())
        self._index.flush()
        self._records = record
        self.documents += 1

    def finish(self) -> None:
        """Write the manifest; the cache can be read from here on."""
        self.close()
        shards = sorted(self._folder.glob("shard-*.bin"))
        manifest = {
            **self._facts,
            **FIXED,
            "version": VERSION,
            "index_record_size": RECORD.itemsize,
            "num_samples": self.documents,
            "num_shards": len(shards),
            "shards": [{"shard_id": n, "file_name": path.name} for n, path in enumerate(shards)],
        }
        write_whole(
            self._folder / MANIFEST,
            (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode(),
        )

    def close(self) -> None:
        """Close the files; what was added stays."""
        self._close_shard()
        self._index.close()

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None

    def _check(self, found: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps(self._facts))
        for key in sorted({*found, *wanted} - {"versions"}):
            if found.get(key) != wanted.get(key):
                raise ValueError(
                    f"{self._folder} holds a cache with {key} = {found.get(key)!r}, this job has "
                    f"{wanted.get(key)!r}: choose another features.output"
                )

    def _end_of(self, record: np.void) -> np.uint64:
        return _offsets(int(record["offsets"][0]), int(record["length"]), self._hidden, self._taps)[
            5
        ]

    def _recover(self) -> np.ndarray:
        """Cut off what a crash left half written; the records that stay."""
        index = self._folder / INDEX
        written = index.read_bytes() if index.exists() else b""
        records = np.frombuffer(
            written[: len(written) // RECORD.itemsize * RECORD.itemsize], RECORD
        )
        sizes = {
            number: path.stat().st_size
            if (path := self._folder / shard_name(number)).exists()
            else 0
            for number in np.unique(records["shard"]).tolist()
        }
        whole = [int(self._end_of(one)) <= sizes[int(one["shard"])] for one in records]
        kept = records[: sum(itertools.accumulate(whole, min))]
        index.write_bytes(kept.tobytes())
        last = int(kept[-1]["shard"]) if len(kept) else -1
        for path in self._folder.glob("shard-*.bin"):
            if int(path.stem.split("-")[1]) > last:
                path.unlink()
        if len(kept):
            with (self._folder / shard_name(last)).open("r+b") as shard:
                shard.truncate(int(self._end_of(kept[-1])))
        return kept


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.bin"


class FeatureCache:
    """A cache on disk; documents are read when asked for, shards are mapped into memory.

    Raises:
        FileNotFoundError: no manifest, index or shard.
        ValueError: another version or dtype, a field or bytes that are missing.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / MANIFEST
        if not path.exists():
            raise FileNotFoundError(
                f"{folder} is no feature cache: it has no {MANIFEST}; make one with a [features] "
                "section and dspark data CONFIG.toml"
            )
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads(path.read_text())
        missing = [name for name in REQUIRED if name not in self.manifest]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        expected = {"version": VERSION, "index_record_size": RECORD.itemsize, **FIXED}
        for name, value in expected.items():
            if self.manifest[name] != value:
                raise ValueError(f"{path}: {name} is {self.manifest[name]!r}; wanted {value!r}")
        self.taps: tuple[int, ...] = tuple(self.manifest["target_layer_ids"])
        self.hidden_size = int(self.manifest["hidden_size"])
        index = folder / INDEX
        size, wanted = index.stat().st_size, self.manifest["num_samples"] * RECORD.itemsize
        if size != wanted:
            raise ValueError(
                f"{index} has {size} bytes; {self.manifest['num_samples']} documents want {wanted}"
            )
        self._records = np.fromfile(index, RECORD)
        self._shards = tuple(folder / shard["file_name"] for shard in self.manifest["shards"])
        self._check_shards()

    def check_fits(self, target_name: str, hidden_size: int, taps: Sequence[int]) -> None:
        """Refuse features of another target, width or set of layers.

        Raises:
            ValueError: names what differs and both values.
        """
        for name, found, wanted in (
            ("target", self.manifest["target_model_name_or_path"], target_name),
            ("hidden_size", self.hidden_size, hidden_size),
            ("target_layer_ids", list(self.taps), list(taps)),
        ):
            if found != wanted:
                raise ValueError(
                    f"the feature cache {self.folder} has {name} {found!r}, the run has {wanted!r}"
                )

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._records)

    def __getitem__(self, index: int) -> CachedSequence:
        """Document ``index``; its features are read from the disk when they are touched."""
        return CachedSequence(
            tokens=self._part(index, 0, "<i4"),
            loss_mask=self.loss_mask(index),
            taps=self._part(index, 3, ml_dtypes.bfloat16, len(self.taps) * self.hidden_size),
            last_hidden=self._part(index, 4, ml_dtypes.bfloat16, self.hidden_size),
        )

    def loss_mask(self, index: int) -> Bool[np.ndarray, "T"]:
        """Which tokens of a document are supervised."""
        return self._part(index, 2, np.uint8).astype(bool)

    @functools.cached_property
    def fingerprint(self) -> dict[str, int]:
        """Counts that change when documents are added, removed or altered in length or mask."""
        return {
            "documents": len(self),
            "tokens": int(self._records["length"].sum()),
            "supervised": sum(int(self.loss_mask(index).sum()) for index in range(len(self))),
        }

    def _part(self, index: int, part: int, dtype: Any, width: int | None = None) -> np.ndarray:
        record = self._records[index]
        length = int(record["length"])
        shape = (length,) if width is None else (length, width)
        mapped = self._mapped[int(record["shard"])]
        count = int(np.prod(shape))
        return np.frombuffer(mapped, dtype, count, int(record["offsets"][part])).reshape(shape)

    @functools.cached_property
    def _mapped(self) -> tuple[np.memmap, ...]:
        return tuple(np.memmap(path, np.uint8, "r") for path in self._shards)

    def _check_shards(self) -> None:
        """Every shard is there and long enough for its documents."""
        for number, path in enumerate(self._shards):
            own = self._records[self._records["shard"] == number]
            lengths = own["length"].astype(np.uint64)
            ends = own["offsets"][:, 4] + lengths * np.uint64(2 * self.hidden_size)
            wanted = int(ends.max()) if len(own) else 0
            if path.stat().st_size < wanted:
                raise ValueError(
                    f"{path} has {path.stat().st_size} bytes; its documents end at {wanted}"
                )
        if len(self) and int(self._records["shard"].max()) >= len(self._shards):
            raise ValueError(
                f"{self.folder / INDEX} names shard {int(self._records['shard'].max())}; the "
                f"manifest lists {len(self._shards)}"
            )
