"""`dspark demo`: the same prompts answered plainly and with DSpark, timed and compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.cli.demo_prompts import PROMPTS
from dspark_jax.cli.side_by_side import Answer, Pair, comparison_table, first_difference
from dspark_jax.decode.request import MAX_LOGPROBS, Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator

CONTEXT_STEP = 64


def demo(
    *,
    target: str = "smollm2-135m",
    drafter: str = "smollm2-135m-dspark",
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    max_new_tokens: int = 128,
    k: int | None = None,
) -> int:
    """Answer a few prompts greedily, plainly and with DSpark, and compare speed and output.

    Args:
        target: smollm2-135m, a Hugging Face folder or id, or a .gguf file.
        drafter: a drafter folder, or the name of a shipped one.
        dtype: of weights and caches, the same for both.
        max_new_tokens: tokens to answer with at most.
        k: drafts in a block; the default is the drafter's block size.

    Returns:
        0, also where bfloat16 rounding made the answers part; 1 if they part in float32.
    """
    console = Console()
    device = jax.devices()[0].device_kind
    console.print(f"[bold]{target}[/bold] with drafter [bold]{drafter}[/bold], {dtype}, {device}")
    with console.status("loading"):
        loaded = load_target(target, dtype)
        pair = load_drafter(
            drafter,
            (loaded.config, loaded.weights),
            dtype,
            stop_token_ids=loaded.stop_token_ids,
        )
    prompts = [(kind, text) for kind, texts in PROMPTS.items() for text in texts]
    encoded = [encode(loaded, text) for _, text in prompts]
    needed = max(map(len, encoded)) + max_new_tokens + 1
    context = -(-needed // CONTEXT_STEP) * CONTEXT_STEP
    plain = Generator(loaded, max_context=context)
    dspark = Generator(loaded, pair, mode="static", k=k, max_context=context)

    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    pairs, sample = [], ""
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        compiling = progress.add_task("compiling and warming up", total=2)
        for session in (plain, dspark):
            answer(session, encoded[0], 8)
            progress.advance(compiling)
        running = progress.add_task("answering", total=2 * len(prompts))
        for (kind, text), ids in zip(prompts, encoded, strict=True):
            timed = []
            for session in (plain, dspark):
                timing, completion = answer(session, ids, max_new_tokens)
                timed.append(timing)
                progress.advance(running)
            sample = sample or (completion.text or "")
            pairs.append(Pair(kind, text, *timed))

    console.print(f"\n[bold]{prompts[0][1]}[/bold]\n{sample.strip()}\n", highlight=False)
    console.print(comparison_table(pairs))
    console.print(
        f"Temperature 0, batch 1, {max_new_tokens} new tokens at most. tokens/s counts the whole "
        "call, prompt included; compilation and warm-up are left out. Accepted length is tokens a "
        "step; plain decoding has 1.",
        style="dim",
    )
    parted = [pair for pair in pairs if first_difference(*outputs(pair)) is not None]
    if not parted:
        console.print(f"[bold green]EXACT[/bold green]: all {len(pairs)} answers are the same")
        return 0
    console.print(f"[bold yellow]{len(parted)} of {len(pairs)} answers part[/bold yellow]:")
    for pair in parted:
        console.print("  " + describe_parting(plain, encode(loaded, pair.prompt), pair))
    if dtype == "float32":
        return 1
    console.print(
        "bfloat16 keeps about 3 digits, and one row rounds otherwise than eight: two tokens that "
        "close may swap. With --dtype float32 the answers are the same."
    )
    return 0


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


def outputs(pair: Pair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of both arms."""
    return pair.plain.token_ids, pair.dspark.token_ids


def describe_parting(plain: Generator, ids: Sequence[int], pair: Pair) -> str:
    """Where two answers part, and how much plain decoding preferred its own token there."""
    index = first_difference(*outputs(pair))
    assert index is not None
    params = SamplingParams(max_new_tokens=index + 1, logprobs=MAX_LOGPROBS)
    (again,) = plain.generate([Request(ids, params)])
    assert again.logprobs is not None
    mine, other = again.token_ids[index], pair.dspark.token_ids[index]
    found = dict(again.logprobs[index].top).get(other)
    if found is None:
        gap = f"which is not among the {MAX_LOGPROBS} best of plain decoding"
    else:
        gap = f"whose logit is {again.logprobs[index].logprob - found:.3g} below"
    return f"{pair.category}: at token {index}, plain takes {mine} and DSpark {other}, {gap}"
