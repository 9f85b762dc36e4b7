"""`dspark generate`: answer one prompt on the terminal, or a file of prompts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from dspark_jax.calibration.records import Records, write_records
from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.decode.confidences import answer_record, record_source
from dspark_jax.decode.config import Mode, Policy
from dspark_jax.decode.interrupt import Interrupt
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.text.prompt_file import read_prompts
from dspark_jax.text.template_digest import template_digest
from dspark_jax.text.text import Text

INTERRUPTED = 130
CONTEXT_STEP = 64


def generate(
    *,
    target: str,
    drafter: str = "none",
    prompt: str | None = None,
    prompts: Path | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    stop_token_ids: tuple[int, ...] = (),
    logprobs: int | None = None,
    mode: Mode | None = None,
    k: int | None = None,
    policy: Policy = "lagged",
    allow_biased: bool = False,
    cost_table: Path | None = None,
    calibration: Path | None = None,
    max_context: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    batch: int = 8,
    json: Annotated[Path | None, tyro.conf.arg(metavar="OUT")] = None,
    record_confidences: Annotated[Path | None, tyro.conf.arg(metavar="OUT")] = None,
    all_turns: bool = False,
    raw: bool = False,
) -> int:
    """Decode prompts with a target and a drafter.

    Args:
        target: smollm2-135m, a Hugging Face folder or id, or a .gguf file.
        drafter: a drafter folder, the name of a shipped one, a Hugging Face id, or none.
        prompt: one prompt; its answer streams to the terminal.
        prompts: a JSON Lines file; each line holds `turns` (user messages, answered through the
            chat template) or `prompt` (raw text).
        max_new_tokens: tokens to answer with at most.
        temperature: 0 is greedy.
        top_k: most likely tokens to draw from; 0 is off.
        top_p: probability mass to draw from; 1 is off.
        seed: makes sampling repeatable; prompt i of a file uses seed + i.
        stop: text that ends an answer; may be repeated.
        stop_token_ids: ids that end an answer beside the model's own.
        logprobs: report each token's logprob and this many alternatives.
        mode: what is verified and committed; the default follows from the drafter.
        k: drafts in a block; the default is the drafter's block size.
        policy: which confidences decide how much is verified.
        allow_biased: consent to policy fresh at temperatures above 0.
        cost_table: measured step costs; without them every draft is verified.
        calibration: temperatures of the confidence head.
        max_context: tokens of prompt and answer together; the default fits the prompts.
        dtype: of weights and caches.
        batch: prompts decoded together.
        json: write one line a prompt, in order: prompt_ids, token_ids, text, finish_reason,
            accepted_length, windows, and logprobs when asked for.
        record_confidences: write what verification said of every draft's confidence, for
            `dspark calibrate`; use it with --mode static.
        all_turns: answer every turn of a prompt, not only the first.
        raw: send --prompt as it is, without the chat template.

    Returns:
        0, or 130 after Ctrl-C.
    """
    if (prompt is None) == (prompts is None):
        raise ValueError("give one of --prompt TEXT and --prompts FILE.jsonl")
    if prompt == "":
        raise ValueError("--prompt is empty; wanted at least one character")
    if prompts is not None and raw:
        raise ValueError(
            "--raw is for --prompt; wanted lines with prompt in place of turns in --prompts"
        )
    if prompt is not None and all_turns:
        raise ValueError("--all-turns is for --prompts, whose lines may hold several turns")
    if record_confidences is not None and not record_confidences.parent.is_dir():
        raise FileNotFoundError(f"no folder {record_confidences.parent} to write records in")
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
    )
    if temperature == 0 and (top_k != 0 or top_p != 1):
        raise ValueError(
            f"top_k is {top_k} and top_p {top_p:g} at temperature 0, where nothing is drawn; "
            "wanted --temperature above 0, or neither"
        )
    lines: list[dict[str, Any]]
    if prompts is not None:
        lines = read_prompts(prompts)
    else:
        lines = [{"prompt": prompt} if raw else {"turns": [prompt]}]
    loaded = load_target(target, dtype)
    text = loaded.text
    if text is None:
        raise ValueError(f"target {target} has no tokenizer, so it cannot read text prompts")
    if prompt is not None and not text.has_template:
        lines = [{"prompt": prompt}]
    pair = None
    if drafter != "none":
        pair = load_drafter(
            drafter,
            (loaded.config, loaded.weights),
            dtype,
            stop_token_ids=loaded.stop_token_ids,
        )
    turns = max(1, *(len(line.get("turns", ())) for line in lines)) if all_turns else 1
    if max_context is None:
        max_context = min(
            loaded.config.max_position_embeddings,
            _needed_context(text, lines, turns, max_new_tokens),
        )
    session = Generator(
        loaded,
        pair,
        batch=min(batch, len(lines)),
        max_context=max_context,
        mode=mode,
        k=k,
        policy=policy,
        allow_biased=allow_biased,
        cost_table=cost_table,
        calibration=calibration,
        record_confidences=record_confidences is not None,
    )
    with ExitStack() as stack:
        out = stack.enter_context(json.open("w", encoding="utf-8")) if json is not None else None
        interrupt = stack.enter_context(Interrupt())
        answers = _answer_turns(session, text, lines, params, turns, interrupt)
        for own in answers:
            if out is not None:
                _write(out, own, logprobs is not None)
            elif len(lines) > 1:
                print(own[-1].text)
    if record_confidences is not None:
        served = all("turns" in line for line in lines)
        template = template_digest(text) if served else None
        source = record_source(session, params, template)
        found = [
            answer_record(answer, own[0].prompt_ids)
            for own in answers
            for answer in own
            if answer.commits
        ]
        write_records(record_confidences, Records(source, tuple(found)))
    aborted = any(answer.finish_reason == "abort" for own in answers for answer in own)
    return INTERRUPTED if interrupt.pending or aborted else 0


def _prompt_ids(text: Text, line: dict[str, Any], answers: Sequence[str]) -> list[int]:
    """A raw prompt, or the conversation up to the user's turn after these answers."""
    if "prompt" in line:
        return text.encode(line["prompt"])
    messages = [{"role": "user", "content": line["turns"][0]}]
    for answer, user in zip(answers, line["turns"][1:], strict=False):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": user})
    return text.chat_ids(messages)


def _needed_context(
    text: Text, lines: Sequence[dict[str, Any]], turns: int, max_new_tokens: int
) -> int:
    """Tokens that the longest conversation can take, its answers included."""
    silence = [""] * (turns - 1)
    asked = max(len(_prompt_ids(text, line, silence)) for line in lines)
    return -(-(asked + turns * max_new_tokens + 1) // CONTEXT_STEP) * CONTEXT_STEP


def _answer_turns(
    session: Generator,
    text: Text,
    lines: Sequence[dict[str, Any]],
    params: SamplingParams,
    turns: int,
    interrupt: Interrupt,
) -> list[list[Completion]]:
    """Every prompt's answers, a round of generation for each turn; Ctrl-C ends the last round.

    A later turn whose conversation has outgrown the context gets an empty answer that says so.
    """
    answers: list[list[Completion]] = [[] for _ in lines]
    for turn in range(turns):
        if interrupt.pending:
            break
        asked, requests = [], []
        for index, line in enumerate(lines):
            if turn > 0 and turn >= len(line.get("turns", [])):
                continue
            ids = _prompt_ids(text, line, [answer.text or "" for answer in answers[index]])
            if turn > 0 and len(ids) >= session.context:
                answers[index].append(_no_room(ids, params))
                continue
            asked.append(index)
            requests.append(Request(ids, _seeded(params, index + turn * len(lines))))
        found = _run(session, requests, interrupt, stream=len(lines) == 1)
        for index, completion in zip(asked, found, strict=True):
            answers[index].append(completion)
    return answers


def _run(
    session: Generator, requests: Sequence[Request], interrupt: Interrupt, *, stream: bool
) -> list[Completion]:
    """Generate with the text of the one answer, or a progress bar over many, on the terminal."""
    if not requests:
        return []
    if stream:

        def show(piece: str) -> None:
            sys.stdout.write(piece)
            sys.stdout.flush()

        found = session.generate(requests, on_text=show, interrupt=interrupt)
        print()
        return found
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(requests))
        return session.generate(
            requests, on_completion=lambda *_: progress.advance(task), interrupt=interrupt
        )


def _no_room(prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
    logprobs = None if params.logprobs is None else ()
    return Completion(tuple(prompt_ids), (), "", "context", (), (), (), logprobs)


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    if params.seed is None:
        return params
    return dataclasses.replace(params, seed=(params.seed + index) % 2**32)


def _record(answer: Completion, logprobs: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt_ids": answer.prompt_ids,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "accepted_length": answer.accepted_length,
        "windows": answer.windows,
    }
    if logprobs:
        record["logprobs"] = [
            {"token_id": one.token_id, "logprob": one.logprob, "top": one.top}
            for one in answer.logprobs or ()
        ]
    return record


def _write(out: TextIO, answers: Sequence[Completion], logprobs: bool) -> None:
    """One line: the last answer, with those of earlier turns under ``earlier``."""
    record = _record(answers[-1], logprobs)
    if len(answers) > 1:
        record["earlier"] = [_record(answer, logprobs) for answer in answers[:-1]]
    out.write(dumps(record, ensure_ascii=False) + "\n")
