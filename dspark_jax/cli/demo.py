"""`dspark demo`: the same prompts answered plainly and with DSpark, timed and compared."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.cli.demo_prompts import PROMPTS
from dspark_jax.cli.side_by_side import Answer, Pair, comparison_table, first_difference
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.models.ragged import rectangle
from pallas_kernels.row_linear.few_rows import MOST_ROWS

CONTEXT_STEP = 64
RECHECKED = 2
"""Answers that part in bfloat16 that are looked at, and decoded again in float32, at most."""
BEYOND = 16
"""Tokens decoded again beyond the place where two answers parted."""

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Arms:
    """The two ways of decoding one target, and the prompts encoded for it."""

    target: LoadedTarget
    plain: Generator
    dspark: Generator
    prompts: list[list[int]]


def demo(
    *,
    target: str = "smollm2-135m",
    drafter: str = "smollm2-135m-dspark",
    dtype: Dtype = "bfloat16",
    max_new_tokens: int = 64,
    k: int | None = None,
) -> int:
    """Answer a few prompts greedily, plainly and with DSpark, and compare speed and output.

    Args:
        target: smollm2-135m, a Hugging Face folder or id, or a .gguf file.
        drafter: a drafter folder, the name of a shipped one, or a Hugging Face id.
        dtype: of weights and caches, the same for both.
        max_new_tokens: tokens to answer with at most.
        k: drafts in a block; the default is the drafter's block size, on CPUs at most as many
            as leave verification its quick products of few rows.

    Returns:
        0, or 1 if the answers part in float32; bfloat16 rounding may make them part.
    """
    console = Console()
    device = jax.devices()[0].device_kind
    console.print(f"[bold]{target}[/bold] with drafter [bold]{drafter}[/bold], {dtype}, {device}")
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        with console.status("loading"):
            arms = open_arms(target, drafter, dtype, k, max_new_tokens)
        pairs, sample = decode_pairs(arms, max_new_tokens, console)
        question = next(iter(PROMPTS.values()))[0]
        console.print(f"\n[bold]{question}[/bold]\n{sample.strip()}\n", highlight=False)
        console.print(comparison_table(pairs))
        console.print(
            f"Temperature 0, batch 1, {max_new_tokens} new tokens at most, "
            f"{arms.dspark.config.depth} drafts a step. tokens/s counts the "
            "whole call, prompt included; compilation and warm-up are left out. Accepted length "
            "is tokens a step; plain decoding has 1.",
            style="dim",
        )
        parted = {
            index: place
            for index, pair in enumerate(pairs)
            if (place := first_difference(pair.plain.token_ids, pair.dspark.token_ids)) is not None
        }
        if not parted:
            console.print(f"[bold green]EXACT[/bold green]: all {len(pairs)} answers are the same")
            return 0
        console.print(f"[bold yellow]{len(parted)} of {len(pairs)} answers part[/bold yellow]:")
        with console.status("looking at where they part"):
            for index, place in list(parted.items())[:RECHECKED]:
                how = describe_parting(arms, index, pairs[index], place)
                console.print(f"  {pairs[index].category}: {how}", highlight=False, markup=False)
    if dtype == "float32":
        return 1
    count = min(len(parted), RECHECKED)
    console.print(
        "bfloat16 keeps about 3 digits, and one row may round otherwise than several: where two "
        f"tokens are that close, either may win. Decoding {count} of the {len(parted)} again in "
        "float32 ..."
    )
    with jax.default_matmul_precision("highest"), console.status("decoding in float32"):
        exact = parted_answers_agree(
            open_arms(target, drafter, "float32", k, max_new_tokens), parted
        )
    if exact:
        console.print(
            f"[bold green]EXACT[/bold green] in float32: plain and DSpark agree in the {count} "
            f"answers decoded again, up to {BEYOND} tokens past the place"
        )
        return 0
    console.print("[bold red]DIFFERENT[/bold red] in float32 as well")
    return 1


def open_arms(target: str, drafter: str, dtype: Dtype, k: int | None, tokens: int) -> Arms:
    """Load both models once for both arms, with room for every prompt and ``tokens`` more."""
    loaded = load_target(target, dtype)
    pair = load_drafter(
        drafter, (loaded.config, loaded.weights), dtype, stop_token_ids=loaded.stop_token_ids
    )
    prompts = [encode(loaded, text) for texts in PROMPTS.values() for text in texts]
    needed = max(map(len, prompts)) + tokens + 1
    context = -(-needed // CONTEXT_STEP) * CONTEXT_STEP
    return Arms(
        loaded,
        Generator(loaded, max_context=context),
        Generator(
            loaded,
            pair,
            mode="static",
            k=default_k(pair.config.block_size) if k is None else k,
            max_context=context,
        ),
        prompts,
    )


def default_k(block_size: int) -> int:
    """Drafts that pay on this machine, without a cost table to ask."""
    return min(block_size, MOST_ROWS - 1) if jax.default_backend() == "cpu" else block_size


def encode(target: LoadedTarget, prompt: str) -> list[int]:
    """Ids of a user's message, through the chat template where there is one.

    Raises:
        ValueError: the target has no tokenizer.
    """
    if target.text is None:
        raise ValueError(f"target {target.name} has no tokenizer, so it cannot read text prompts")
    if target.text.has_template:
        return target.text.chat_ids([{"role": "user", "content": prompt}])
    return target.text.encode(prompt)


def decode_pairs(arms: Arms, tokens: int, console: Console) -> tuple[list[Pair], str]:
    """Every prompt by both arms in turn, timed, and the text of the first answer."""
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    kinds = [kind for kind, texts in PROMPTS.items() for _ in texts]
    pairs, sample = [], ""
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        compiling = progress.add_task("compiling and warming up", total=2)
        for session in (arms.plain, arms.dspark):
            answer(session, arms.prompts[0], min(tokens, 8))
            progress.advance(compiling)
        answering = progress.add_task("answering", total=2 * len(kinds))
        for kind, ids in zip(kinds, arms.prompts, strict=True):
            plain, _ = answer(arms.plain, ids, tokens)
            progress.advance(answering)
            dspark, completion = answer(arms.dspark, ids, tokens)
            progress.advance(answering)
            sample = sample or completion.text or ""
            pairs.append(Pair(kind, plain, dspark))
    return pairs, sample


def answer(session: Generator, ids: Sequence[int], tokens: int) -> tuple[Answer, Completion]:
    """One greedy answer and how long it took.

    Raises:
        KeyboardInterrupt: Ctrl-C, which the session itself turns into a partial answer.
    """
    begin = time.perf_counter()
    (completion,) = session.generate([Request(ids, SamplingParams(max_new_tokens=tokens))])
    seconds = time.perf_counter() - begin
    if completion.finish_reason == "abort":
        raise KeyboardInterrupt
    return Answer(completion.token_ids, seconds, len(completion.commits)), completion


def describe_parting(arms: Arms, index: int, pair: Pair, place: int) -> str:
    """How two answers part, and how much one forward over the text before prefers plain's token."""
    assert arms.target.text is not None
    mine, other = pair.plain.token_ids[place], pair.dspark.token_ids[place]
    own, others = (repr(arms.target.text.decode([token])) for token in (mine, other))
    ids = [*arms.prompts[index], *pair.plain.token_ids[:place]]
    logits = next_logits(arms.target, ids, arms.plain.context)
    gap = logits[mine] - logits[other]
    return (
        f"at token {place}, plain takes {own} and DSpark {others}; "
        f"in one forward over the text before, the first is ahead by {gap:.2g}"
    )


def next_logits(target: LoadedTarget, ids: Sequence[int], width: int) -> Float[np.ndarray, "V"]:
    """Logits of the token after ``ids``, in one forward of ``width`` rows."""
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(_next_logits(target.weights, tokens, len(ids), config=target.config))


@functools.partial(jax.jit, static_argnames="config")
def _next_logits(weights: Any, tokens: Any, count: Any, *, config: Any) -> Float[Array, "V"]:
    family = config.family
    dtype = family.input_embedding(weights).dtype
    cache = family.init_cache(config, 1, tokens.shape[1], dtype)
    rows = rectangle(tokens, jnp.zeros(1, jnp.int32), jnp.reshape(count, (1,)))
    hidden, _, _ = family.forward(config, weights, cache, rows, taps=())
    return family.unembed(config, weights, hidden[count - 1])


def parted_answers_agree(arms: Arms, parted: dict[int, int]) -> bool:
    """Whether both arms give the same tokens there, a little past where they parted."""
    for index, place in list(parted.items())[:RECHECKED]:
        plain, _ = answer(arms.plain, arms.prompts[index], place + BEYOND)
        dspark, _ = answer(arms.dspark, arms.prompts[index], place + BEYOND)
        if plain.token_ids != dspark.token_ids:
            return False
    return True
