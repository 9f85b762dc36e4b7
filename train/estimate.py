"""What a data job will take, in time and on the disk, from a measured sample of it."""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from train.data import TokenSequence
from train.data_config import DataConfig
from train.feature_cache import bytes_a_token
from train.shards import TOKEN_BYTES, shard_path, write_shard

MEASURED_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class Probe:
    """A measured sample: its documents, and the seconds it took, None if parts were known."""

    conversations: int
    seconds: float | None
    documents: Sequence[TokenSequence]

    @property
    def tokens(self) -> int:
        """Tokens of all documents, prompts included."""
        return sum(len(document.tokens) for document in self.documents)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What ``conversations`` conversations will take."""

    conversations: int
    tokens: int
    seconds: float | None
    shard_bytes: int
    feature_bytes: int

    def told(self) -> str:
        """One line for the user."""
        time = "time unknown (answers of an earlier attempt)"
        if self.seconds is not None:
            time = f"about {duration(self.seconds)}"
        size = f"{readable_bytes(self.shard_bytes)} of tokens"
        if self.feature_bytes:
            size += f" and {readable_bytes(self.feature_bytes)} of features"
        amount = f"{self.conversations:,} conversations, {self.tokens:,} tokens"
        return f"estimate: {amount}, {time}, {size}"


def extrapolate(
    probe: Probe, conversations: int, shards: int, feature_bytes_a_token: int
) -> Estimate:
    """Scale a sample to ``conversations`` in ``shards`` files."""
    share = conversations / max(1, probe.conversations)
    tokens = round(probe.tokens * share)
    return Estimate(
        conversations=conversations,
        tokens=tokens,
        seconds=None if probe.seconds is None else probe.seconds * share,
        shard_bytes=round(_body_bytes(probe) * share) + shards * _written_bytes([]),
        feature_bytes=tokens * feature_bytes_a_token,
    )


def _body_bytes(probe: Probe) -> float:
    """Bytes that the sample's documents take in a shard, its fixed part not counted.

    Files grow in blocks: the sample is written often enough to fill many. Records are compressed
    one by one, so repeating them does not make them smaller.
    """
    if not probe.tokens:
        return 0.0
    times = math.ceil(MEASURED_BYTES / (TOKEN_BYTES * probe.tokens))
    return (_written_bytes(list(probe.documents) * times) - _written_bytes([])) / times


def _written_bytes(documents: Sequence[TokenSequence]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder), 0, documents)
        return shard_path(Path(folder), 0).stat().st_size


def announce(
    probe: Probe, conversations: int, shards: int, config: DataConfig, hidden_size: int
) -> None:
    """Print the estimate for ``conversations`` in ``shards`` files.

    Raises:
        ValueError: a disk with less room than the estimate.
    """
    features = config.features
    a_token = 0 if features is None else bytes_a_token(hidden_size, len(features.target_layer_ids))
    found = extrapolate(probe, conversations, shards, a_token)
    print(found.told())
    check_room(Path(config.answers.output), found.shard_bytes, "answers.output")
    if features is not None:
        check_room(Path(features.output), found.feature_bytes, "features.output")


def check_room(folder: Path, needed: int, name: str) -> None:
    """Refuse a disk with less than ``needed`` bytes free.

    Raises:
        ValueError: names both numbers.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(
            f"{name} {folder} has {readable_bytes(free)} free and the job needs about "
            f"{readable_bytes(needed)}: choose another disk or fewer prompts"
        )


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads well."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def readable_bytes(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
