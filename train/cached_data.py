"""Documents of a feature cache, cut to length, with enough to learn from."""

from __future__ import annotations

import dataclasses

from train.feature_cache import CachedSequence, FeatureCache


class CachedDataset:
    """The documents of ``cache`` with ``minimum`` supervised tokens among their first ``length``.

    Raises:
        ValueError: nothing is left.
    """

    def __init__(self, cache: FeatureCache, length: int, minimum: int) -> None:
        self._cache, self._length = cache, length
        self._kept = [
            index for index in range(len(cache)) if cache.loss_mask(index)[:length].sum() >= minimum
        ]
        if not self._kept:
            raise ValueError(
                f"none of {len(cache)} documents has {minimum} supervised tokens within its first "
                f"{length}"
            )

    def __len__(self) -> int:
        """Number of documents left."""
        return len(self._kept)

    def __getitem__(self, index: int) -> CachedSequence:
        """Document ``index`` of those left."""
        document = self._cache[self._kept[index]]
        parts = {
            field.name: getattr(document, field.name)[: self._length]
            for field in dataclasses.fields(document)
        }
        return CachedSequence(**parts)

    @property
    def fingerprint(self) -> dict[str, int]:
        """That of the cache, and how many documents are left."""
        return {**self._cache.fingerprint, "used": len(self)}
