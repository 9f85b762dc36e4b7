"""Reference comparison of targets: hidden states, logits, greedy answers, tokenisation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dspark_jax.checkpoints.resolve import SMOLLM2, LoadedTarget, load_target
from dspark_jax.cli.check_choices import absolute_where, decided
from dspark_jax.cli.check_recorded import recorded_numbers, recorded_tensors
from dspark_jax.cli.check_rows import Row, absolute, identical
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.ragged import rectangle

SMOLLM2_LAYERS = (0, 9, 19)


def check_folder(directory: Path) -> list[Row]:
    """Compare a target with the tensors recorded beside it."""
    target = load_target(directory, jnp.float32)
    golden = recorded_tensors(directory / "golden.safetensors")
    tokens = golden["input_ids"].astype(np.int32)
    layers = target.config.num_hidden_layers
    # The recorded last entry is the one after the final norm; the layer before it has no entry.
    taps = tuple(range(-1, layers - 1))
    if isinstance(target.config, DeepseekV4Config):
        # Between its layers there are several residual streams, and none of them is recorded.
        taps = ()
    recorded = golden["greedy"][0].tolist()
    slots, width = tokens.shape
    texts = np.zeros((slots + 1, max(width, len(recorded))), np.int32)
    texts[:slots, :width] = tokens
    texts[slots, : len(recorded)] = recorded
    final, tapped, margins = forward(target, texts, taps)
    final, tapped = final[:slots, :width], tapped[:slots, :width]
    clear = decided(np.full((layers, *texts.shape), np.inf) if margins is None else margins)
    rows = []
    if taps:
        states = jnp.moveaxis(tapped.reshape(*tokens.shape, layers, -1), 2, 0)
        states = jnp.concatenate([states, final[None]])
        rows = [
            absolute_where(
                f"hidden_states[{index}]",
                states[index],
                golden["hidden_states"][index],
                clear[index, :slots, :width],
            )
            for index in range(layers + 1)
        ]
    logits = target.config.family.unembed(target.config, target.weights, final)
    rows.append(absolute_where("logits", logits, golden["logits"], clear[-1, :slots, :width]))
    # Each position that is decided decides the token behind it.
    text = clear[-1, slots, : len(recorded)]
    count = len(recorded) if text.all() else int(np.argmin(text)) + 1
    prompt = tokens[0].tolist()
    if count > len(prompt):
        answer = greedy(target, [prompt], len(recorded) - len(prompt))[0]
        rows.append(identical("greedy", (prompt + answer)[:count], recorded[:count]))
    return rows


def check_text_folder(directory: Path, name_or_path: Path | str | None) -> list[Row]:
    """Compare a real model (default: SmolLM2-135M) with recorded ids, logits and answers."""
    target = load_target(name_or_path or SMOLLM2, jnp.float32)
    if target.text is None:
        raise ValueError(f"{target.name} has no tokenizer, and {directory} holds tokenised text")
    recorded = recorded_numbers(directory / "text_and_greedy.json")
    rows = [
        identical(f"strings[{index}].ids", target.text.encode(entry["text"]), entry["ids"])
        for index, entry in enumerate(recorded["strings"])
    ]
    chat = recorded["chat"]
    for index, entry in enumerate(chat):
        ids = target.text.chat_ids([{"role": "user", "content": entry["prompt"]}])
        rows.append(identical(f"chat[{index}].prompt_ids", ids, entry["prompt_ids"]))
    longest = max(len(entry["greedy"]) for entry in chat)
    answers = greedy(target, [entry["prompt_ids"] for entry in chat], longest)
    for index, entry in enumerate(chat):
        # An answer that was recorded up to its stop token goes on in ``answers``.
        answer = answers[index][: len(entry["greedy"])]
        rows.append(identical(f"chat[{index}].greedy", answer, entry["greedy"]))

    golden = recorded_tensors(directory / "logits.safetensors")
    tokens = golden["prompt_ids"].astype(np.int32)[None]
    final, taps, _ = forward(target, tokens, SMOLLM2_LAYERS)
    states = taps[0].reshape(tokens.shape[1], len(SMOLLM2_LAYERS), -1)
    logits = target.config.family.unembed(target.config, target.weights, final[0, -4:])
    rows.append(absolute("logits_last4", logits, golden["logits_last4"]))
    for index, layer in enumerate(SMOLLM2_LAYERS):
        wanted = golden["hidden_layer_0_9_19"][index]
        rows.append(absolute(f"hidden_layer[{layer}]", states[-4:, index], wanted))
    return rows


def forward(
    target: LoadedTarget, tokens: Int[np.ndarray, "S W"], taps: tuple[int, ...]
) -> tuple[Array, Array, np.ndarray | None]:
    """Final hidden states ``[S, W, D]`` and taps ``[S, W, n*D]`` of whole sequences.

    Last come the margins ``[L, S, W]`` of a model that chooses rows (``check_choices``).
    """
    count = np.full(tokens.shape[0], tokens.shape[1])
    hidden, tapped, margins = _forward(target.config, target.weights, tokens, count, taps)
    if margins is not None:
        margins = np.asarray(margins).reshape(-1, *tokens.shape)
    return hidden.reshape(*tokens.shape, -1), tapped.reshape(*tokens.shape, -1), margins


def greedy(target: LoadedTarget, prompts: list[list[int]], count: int) -> list[list[int]]:
    """``count`` greedy tokens for each prompt; prompts too are read one row a step."""
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    answers = _greedy(target.config, target.weights, tokens, lengths, count)
    return np.asarray(answers).T.tolist()


@functools.partial(jax.jit, static_argnums=(0, 4))
def _forward(
    config: Any, weights: Any, tokens: Int[Array, "S W"], count: Array, taps: tuple[int, ...]
) -> Any:
    family = config.family
    cache = family.init_cache(config, *tokens.shape, weights.embed.dtype)
    packed = rectangle(tokens, jnp.zeros_like(count), count)
    if hasattr(family, "forward_with_margins"):
        hidden, tapped, _, margins = family.forward_with_margins(
            config, weights, cache, packed, taps=taps
        )
        return hidden, tapped, margins
    return *family.forward(config, weights, cache, packed, taps=taps)[:2], None


@functools.partial(jax.jit, static_argnums=(0, 4))
def _greedy(
    config: Any, weights: Any, tokens: Int[Array, "S W"], length: Int[Array, "S"], count: int
) -> Int[Array, "C S"]:
    family = config.family
    slots, width = tokens.shape
    steps = width + count - 1
    cache = family.init_cache(config, slots, width + count, weights.embed.dtype)
    text = jnp.pad(tokens, ((0, 0), (0, count)))

    def step(carry: tuple[Any, Array], position: Array) -> tuple[tuple[Any, Array], Array]:
        cache, following = carry
        start = jnp.full(slots, position, jnp.int32)
        token = jnp.where(position < length, text[:, position], following)
        cache = family.commit(config, cache, start)
        packed = rectangle(token[:, None], start, jnp.ones_like(start))
        hidden, _, cache = family.forward(config, weights, cache, packed, taps=())
        following = jnp.argmax(family.unembed(config, weights, hidden), axis=-1).astype(jnp.int32)
        return (cache, following), following

    begin = (cache, jnp.zeros(slots, jnp.int32))
    every = jax.lax.scan(step, begin, jnp.arange(steps, dtype=jnp.int32))[1]
    answer = length[None] - 1 + jnp.arange(count)[:, None]
    return jnp.take_along_axis(every, answer, axis=0)
