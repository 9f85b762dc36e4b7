"""Training data from the target itself: prompts, its sampled answers, shards on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tyro

from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.text.text import Text
from train.config import TargetSection, read_config
from train.data import TokenSequence, shard_path, supervised_answer, write_manifest, write_shard
from train.progress import progress_bar
from train.run_folder import versions

USER_TURNS, ANSWERS = range(2)
PROBE = "PROBE"


@dataclasses.dataclass(frozen=True)
class PromptsSection:
    """Prompts to answer: JSON Lines files whose ``turns[0]`` is the user's message."""

    files: tuple[str, ...]
    samples_per_prompt: int = 1


@dataclasses.dataclass(frozen=True)
class SelfPromptingSection:
    """Let the chat model write ``count`` user turns from its own template, at temperature 1."""

    count: int
    max_prompt_tokens: int = 256


@dataclasses.dataclass(frozen=True)
class AnswersSection:
    """How answers are sampled; ``max_context`` bounds prompt and answer together, in tokens."""

    output: str
    max_new_tokens: int
    max_context: int
    temperature: float = 1.0
    seed: int = 42
    batch: int = 1024
    shard_size: int = 16384


@dataclasses.dataclass(frozen=True)
class AnswersConfig:
    """One data folder, from prompt files or by self-prompting: exactly one of the two."""

    target: TargetSection
    answers: AnswersSection
    prompts: PromptsSection | None = None
    self_prompting: SelfPromptingSection | None = None

    def __post_init__(self) -> None:
        """Refuse none or both sources of prompts."""
        if (self.prompts is None) == (self.self_prompting is None):
            raise ValueError("give one of the sections prompts and self_prompting")


def build_dataset(config: AnswersConfig, target: LoadedTarget) -> Path:
    """Write the data folder of ``config``; complete shards of an earlier attempt are kept.

    Every answer has its own seed, fixed by the job's seed and the answer's index: a resumed
    job writes what an unbroken one would have written. Prompts that leave no room for
    ``max_new_tokens``, and self-written user turns that are empty or too long, are left out.

    Raises:
        ValueError: a target without tokenizer or template, a faulty prompt file, a folder
            that holds the data of another job.
        KeyboardInterrupt: the user stopped it; complete shards stay.
    """
    text = target.text
    if text is None or not text.has_template:
        raise ValueError(f"target {target.name} has no chat template to write data with")
    folder = Path(config.answers.output)
    turns = _user_turns(config.prompts) if config.prompts else None
    total = _answer_count(config, turns)
    write_manifest(folder, _manifest(config, target.name, text, turns))
    session = Generator(
        target,
        None,
        mode="off",
        batch=min(config.answers.batch, total, config.answers.shard_size),
        max_context=config.answers.max_context,
    )
    size = config.answers.shard_size
    shards = [range(first, min(first + size, total)) for first in range(0, total, size)]
    pending = [n for n in range(len(shards)) if not shard_path(folder, n).exists()]
    remaining = sum(len(shards[n]) for n in pending)
    with progress_bar("answers", total, total - remaining) as advance:
        tokens, began = 0, time.monotonic()

        def count(_: int, completion: Completion) -> None:
            nonlocal tokens
            tokens += len(completion.token_ids)
            advance(1, f"{tokens / (time.monotonic() - began):,.0f} tokens/s")

        for number in pending:
            indices = shards[number]
            if turns is None:
                messages = _write_user_turns(config, session, text, indices)
            else:
                messages = {index: turns[index % len(turns)] for index in indices}
            sequences = _answer(config, session, text, messages, count)
            advance(len(indices) - len(sequences))
            write_shard(folder, number, sequences)
    return folder


def _answer(
    config: AnswersConfig,
    session: Generator,
    text: Text,
    messages: dict[int, str],
    on_completion: Callable[[int, Completion], None],
) -> list[TokenSequence]:
    """Sampled answers to user messages, by the ids that serving would send."""
    settings = config.answers
    requests = []
    for index, message in messages.items():
        prompt_ids = text.chat_ids([{"role": "user", "content": message}])
        if len(prompt_ids) + settings.max_new_tokens <= settings.max_context:
            params = SamplingParams(
                temperature=settings.temperature,
                seed=request_seed(settings.seed, ANSWERS, index),
                max_new_tokens=settings.max_new_tokens,
            )
            requests.append(Request(prompt_ids, params))
    completions = _complete(session, requests, on_completion)
    return [supervised_answer(done.prompt_ids, done.token_ids) for done in completions]


def _write_user_turns(
    config: AnswersConfig, session: Generator, text: Text, indices: Sequence[int]
) -> dict[int, str]:
    """User messages sampled from an opened user turn; unfinished and empty ones are dropped."""
    assert config.self_prompting is not None
    opening = open_user_turn(text)
    requests = [
        Request(
            opening,
            SamplingParams(
                temperature=1.0,
                seed=request_seed(config.answers.seed, USER_TURNS, index),
                max_new_tokens=config.self_prompting.max_prompt_tokens,
            ),
        )
        for index in indices
    ]
    completions = _complete(session, requests, None)
    written = {
        index: (done.text or "").strip()
        for index, done in zip(indices, completions, strict=True)
        if done.finish_reason == "stop"
    }
    return {index: message for index, message in written.items() if message}


def _complete(
    session: Generator,
    requests: Sequence[Request],
    on_completion: Callable[[int, Completion], None] | None,
) -> list[Completion]:
    completions = session.generate(requests, on_completion=on_completion)
    if any(done.finish_reason == "abort" for done in completions):
        raise KeyboardInterrupt
    return completions


def open_user_turn(text: Text) -> list[int]:
    """Ids of a conversation up to where the user's message begins, system part included."""
    rendered = text.render([{"role": "user", "content": PROBE}], add_generation_prompt=False)
    return text.encode(rendered[: rendered.index(PROBE)])


def request_seed(seed: int, role: int, index: int) -> int:
    """A 32-bit seed for one request of a job; the same in every run."""
    return int(np.random.SeedSequence([seed, role, index]).generate_state(1)[0])


def _answer_count(config: AnswersConfig, turns: Sequence[str] | None) -> int:
    if turns is None:
        assert config.self_prompting is not None
        return config.self_prompting.count
    assert config.prompts is not None
    return len(turns) * config.prompts.samples_per_prompt


def _user_turns(prompts: PromptsSection) -> list[str]:
    """First user messages of all files, in order."""
    turns = []
    for file in prompts.files:
        for number, line in enumerate(Path(file).read_text().splitlines(), 1):
            entry = json.loads(line)
            first = (entry.get("turns") or [None])[0]
            if not isinstance(first, str):
                raise ValueError(f"{file}, line {number}: wanted turns, a list of strings")
            turns.append(first)
    if not turns:
        raise ValueError(f"no prompt in {', '.join(prompts.files)}")
    return turns


def _manifest(
    config: AnswersConfig, target: str, text: Text, turns: Sequence[str] | None
) -> dict[str, object]:
    """What the data is; everything here except versions must match for a job to continue."""
    rendered = text.render([{"role": "user", "content": PROBE}])
    prompts = "self-prompting" if turns is None else _digest("\n".join(turns))
    job = dataclasses.asdict(config)
    for name in ("output", "batch"):
        del job["answers"][name]
    return {
        "target": target,
        "template_sha256": _digest(rendered),
        "temperature": config.answers.temperature,
        "prompts": prompts,
        "job": job,
        "versions": versions(),
    }


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def main(config: tyro.conf.Positional[Path]) -> None:
    """Write the data folder that a TOML file describes.

    Args:
        config: TOML file with sections target, answers, and prompts or self_prompting.
    """
    settings = read_config(config, AnswersConfig)
    target = load_target(settings.target.name, jnp.dtype(settings.target.dtype))
    print(f"data written to {build_dataset(settings, target)}")


if __name__ == "__main__":
    tyro.cli(main)
