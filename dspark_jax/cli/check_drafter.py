"""Reference comparison of drafters: training forward, losses, and rounds with the draft cache."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.drafter_config import drafter_config
from dspark_jax.checkpoints.drafter_deepspec import read_deepspec
from dspark_jax.checkpoints.drafter_tensors import DrafterTensors
from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.checkpoints.tensors import SafetensorsSource
from dspark_jax.cli.check_recorded import Recorded, recorded_numbers, recorded_tensors
from dspark_jax.cli.check_rows import Row, absolute, identical, relative
from dspark_jax.drafter.backbone import block_hidden_from_context, context_features, context_kv
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.dspark import embed_tokens
from dspark_jax.drafter.heads import walk_block
from dspark_jax.drafter.weights import DrafterWeights


def check_deepspec(directory: Path, target: Path | str | None) -> list[Row]:
    """Compare a DeepSpec drafter, which brings all it needs; a target is only checked to fit."""
    raw = recorded_numbers(directory / "config.json")
    if target is None:
        config = drafter_config(raw, directory)
        tensors = DrafterTensors(SafetensorsSource(directory), directory)
        weights = read_deepspec(config, tensors, jnp.float32)
    else:
        loaded = load_target(target, jnp.float32)
        drafter = load_drafter(directory, (loaded.config, loaded.weights), jnp.float32)
        config, weights = drafter.config, drafter.weights
    golden = recorded_tensors(directory / "golden.safetensors")
    metrics = recorded_numbers(directory / "golden_metrics.json")
    rows = _training_rows(config, weights, golden, metrics)
    return rows + _round_rows(config, weights, golden)


def check_speculators(directory: Path, target: Path | str | None) -> list[Row]:
    """Compare a speculators drafter; the target is by default the folder its config names."""
    raw = recorded_numbers(directory / "config.json")
    beside = directory.parent / raw["speculators_config"]["verifier"]["name_or_path"]
    loaded = load_target(target or beside, jnp.float32)
    drafter = load_drafter(directory, (loaded.config, loaded.weights), jnp.float32)
    config, weights = drafter.config, drafter.weights
    golden = recorded_tensors(directory / "golden.safetensors")
    tokens, anchors = golden["input_ids"].astype(np.int32), golden["anchors"].astype(np.int32)
    family = loaded.config.family
    hidden, base, logits, confidence = _teacher_forced(
        config,
        weights,
        family.input_embedding(loaded.weights),
        family.output_embedding(loaded.weights),
        tokens,
        golden["target_hidden_states"],
        anchors[None],
    )
    found = {"block_hidden": hidden, "base_logits": base, "draft_logits": logits}
    if confidence is not None:
        found["confidence_logits"] = confidence
    return [absolute(name, value[0], golden[name]) for name, value in found.items()]


def _training_rows(
    config: DrafterConfig, weights: DrafterWeights, golden: Recorded, metrics: Recorded
) -> list[Row]:
    from train.forward import Sequences

    keep = golden["block_keep"]
    batch = Sequences(
        tokens=jnp.asarray(golden["input_ids"], jnp.int32),
        loss_mask=jnp.asarray(golden["loss_mask"]) > 0,
        taps=jnp.asarray(golden["target_hidden_states"]),
        last_hidden=jnp.asarray(golden["target_last_hidden_states"]),
    )
    anchors = jnp.asarray(golden["anchors"], jnp.int32)
    blocks, logits, target_logits, confidence, terms = _training_forward(
        config, weights, batch, anchors, jnp.asarray(keep)
    )
    # Dummy blocks attend to nothing in the reference; their numbers are never used.
    real = keep[..., None]
    rows = [
        absolute("draft_logits", logits, golden["draft_logits"], real[..., None]),
        identical("target_ids", blocks.target_ids, golden["target_ids"], real),
        identical("eval_mask", blocks.mask, golden["eval_mask"]),
        absolute(
            "aligned_target_logits",
            target_logits,
            golden["aligned_target_logits"],
            golden["eval_mask"][..., None],
        ),
        relative("loss", terms.loss[None], golden["loss"]),
    ]
    if confidence is not None:
        rows.append(absolute("confidence_logits", confidence, golden["confidence_logits"], real))
    for name, found in terms.metrics.items():
        numerator, denominator = metrics[name]
        if denominator is None:
            continue
        wanted = [numerator, denominator]
        rows.append(relative(name, [found.numerator, found.denominator], wanted))
    return rows


def _round_rows(config: DrafterConfig, weights: DrafterWeights, golden: Recorded) -> list[Row]:
    tokens, taps = golden["input_ids"][0], golden["target_hidden_states"][0]
    ranges = {name: golden[f"{name}.ctx_range"].tolist() for name in ("round0", "round1")}
    widest = max(end - first for first, end in ranges.values())
    context = config.family.init_context(config, 1, len(tokens), weights.fc.dtype)
    rows = []
    for name, (first, end) in ranges.items():
        # One compiled round serves both: rows past the end belong to no slot and are dropped.
        new = np.full((widest, taps.shape[1]), np.nan, np.float32)
        new[: end - first] = taps[first:end]
        anchor = jnp.asarray(tokens[end : end + 1], jnp.int32)
        context, found = _greedy_round(config, weights, context, new, first, end, anchor)
        for key, value in found.items():
            compare = identical if key == "tokens" else absolute
            rows.append(compare(f"{name}.{key}", value, golden[f"{name}.{key}"]))
    return rows


@functools.partial(jax.jit, static_argnums=0)
def _training_forward(
    config: DrafterConfig,
    weights: DrafterWeights,
    batch: Any,
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
) -> tuple[Any, Array, Array, Array | None, Any]:
    from train.draft_heads import frozen_logits
    from train.forward import block_logits, draft_blocks
    from train.losses import LossConfig, dspark_loss

    assert weights.embed is not None
    assert weights.lm_head is not None
    blocks, _ = draft_blocks(config, weights, weights.embed, batch, anchors, keep)
    logits, confidence = block_logits(config, weights, weights.lm_head, blocks)
    target_logits = frozen_logits(blocks.target_hidden, weights.lm_head)
    terms = dspark_loss(
        logits, target_logits, blocks.target_ids, confidence, blocks.mask, LossConfig()
    )
    return blocks, logits, target_logits, confidence, terms


@functools.partial(jax.jit, static_argnums=0)
def _teacher_forced(
    config: DrafterConfig,
    weights: DrafterWeights,
    embed: Float[Array, "V D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, "B K"],
    taps: Float[Array, "B K nDt"],
    anchors: Int[Array, "B A"],
) -> tuple[Array, Array, Array, Array | None]:
    family = config.family
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    context = context_kv(config, weights, context_features(config, weights, taps), position)
    slot = anchors[..., None] + jnp.arange(config.block_size)
    previous = jnp.take_along_axis(tokens[:, None], slot, axis=2)
    block = jnp.full_like(previous, config.mask_token_id).at[..., 0].set(previous[..., 0])
    embedded = embed_tokens(weights, embed, block)
    hidden = block_hidden_from_context(config, weights, embedded, context, anchors)
    base = family.base_logits(config, weights, head, hidden)
    bias, confidence = walk_block(config, weights, hidden, previous)
    return hidden, base, base if bias is None else base + bias, confidence


@functools.partial(jax.jit, static_argnums=0)
def _greedy_round(
    config: DrafterConfig,
    weights: DrafterWeights,
    context: Any,
    taps: Float[Array, "T nDt"],
    first: Int[Array, ""],
    end: Int[Array, ""],
    anchor: Int[Array, "1"],
) -> tuple[Any, dict[str, Array]]:
    """Commit the context rows ``first .. end - 1`` of slot 0, then draft one greedy block.

    Returns the context and, by the names of the recorded tensors, what the round computed.
    """
    family = config.family
    position = first + jnp.arange(taps.shape[0])
    slot = jnp.where(position < end, 0, 1)
    context = family.commit_context(config, weights, context, taps, slot, position)
    start = jnp.asarray(end)[None]
    hidden = family.block_hidden(config, weights, weights.embed, context, anchor, start)
    base = family.base_logits(config, weights, weights.lm_head, hidden)
    state, previous = family.start_walk(config, weights, 1), anchor
    logits, tokens, before = [], [], []
    for j in range(config.block_size):
        before.append(previous)
        bias, state = family.walk(config, weights, state, hidden[:, j], previous)
        corrected = base[:, j] if bias is None else base[:, j] + bias
        previous = jnp.argmax(corrected, axis=-1).astype(anchor.dtype)
        logits.append(corrected)
        tokens.append(previous)
    found = {
        "block_hidden": hidden,
        "base_logits": base,
        "tokens": jnp.stack(tokens, axis=1),
        "corrected_logits": jnp.stack(logits, axis=1),
    }
    confidence = family.confidences(config, weights, hidden, jnp.stack(before, axis=1))
    if confidence is not None:
        found["confidence_logits"] = confidence
    return context, found
