"""The features of a data folder, computed once and written to a cache."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp

from dspark_jax.checkpoints.resolve import LoadedTarget
from train.data import sequential_batches
from train.data_config import DataConfig
from train.estimate import check_room, readable_bytes
from train.feature_cache import CachedSequence, CacheWriter, cache_bytes
from train.features import target_features
from train.progress import progress_bar
from train.run_folder import versions
from train.shards import read_dataset
from train.stopping import Stop

features = jax.jit(target_features, static_argnums=(0, 3))


def check_features(config: DataConfig, target: LoadedTarget, resume: bool) -> None:
    """Refuse features that cannot be cached, before anything is generated.

    Raises:
        FileExistsError: a folder that is not empty, without ``resume``.
        ValueError: a layer that is not there, or the last one, whose output other engines report
            after the final norm.
    """
    if config.features is None:
        return
    folder = Path(config.features.output)
    if not resume and folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"features.output {folder} is not empty: continue its cache with --resume, or choose "
            "another folder"
        )
    last = target.config.num_hidden_layers - 1
    for layer in config.features.target_layer_ids:
        if not -1 <= layer < last:
            raise ValueError(
                f"features.target_layer_ids holds {layer}; target {target.name} can be tapped at "
                f"-1 (the embedding) to {last - 1}"
            )


def cache_features(
    config: DataConfig, target: LoadedTarget, *, resume: bool = False, stop: Stop | None = None
) -> Path:
    """Write the cache of ``config.features`` for the complete data folder of ``config``.

    Documents are cut at ``answers.max_context``, which they do not pass anyway.

    Raises:
        ValueError: features that the target lacks, a folder with another cache, a full disk.
        FileExistsError: a folder that is not empty, without ``resume``.
        Stopped: a signal came; whole documents stay.
    """
    assert config.features is not None
    check_features(config, target, resume)
    section, length = config.features, config.answers.max_context
    dataset = read_dataset(Path(config.answers.output))
    taps, hidden = section.target_layer_ids, target.config.hidden_size
    folder = Path(section.output)
    facts = {
        "target_model_name_or_path": target.name,
        "target_layer_ids": list(taps),
        "hidden_size": hidden,
        "max_length": length,
        "template_sha256": dataset.manifest["template_sha256"],
        "thinking": dataset.manifest.get("thinking"),
        "temperature": dataset.manifest["temperature"],
        "source": config.answers.output,
        "source_fingerprint": dataset.fingerprint,
        "versions": versions(),
    }
    needed = cache_bytes(len(dataset), dataset.fingerprint["tokens"], hidden, len(taps))
    stop = stop or Stop()
    writer = CacheWriter(folder, facts, shard_bytes=section.shard_bytes, resume=resume)
    try:
        if not writer.documents:
            print(f"feature cache: {readable_bytes(needed)} in {folder}")
            check_room(folder, needed, "features.output")
        batches = math.ceil(len(dataset) / section.batch)
        # A batch is computed as a whole even if some of it is there: its numbers stay the same.
        first = writer.documents // section.batch
        with progress_bar("features", batches, first) as advance:
            for number, batch in enumerate(
                sequential_batches(dataset, batch_size=section.batch, length=length)
            ):
                if number < first:
                    continue
                stop.check()
                tapped, last = jax.device_get(
                    features(target.config, target.weights, jnp.asarray(batch["tokens"]), taps)
                )
                for row in range(section.batch):
                    index = number * section.batch + row
                    if index < writer.documents or index >= len(dataset):
                        continue
                    document = dataset[index]
                    size = len(document.tokens)
                    writer.add(
                        CachedSequence(
                            document.tokens,
                            document.loss_mask,
                            tapped[row, :size],
                            last[row, :size],
                        )
                    )
                advance(1)
        writer.finish()
    finally:
        writer.close()
    return folder
