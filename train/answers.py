"""Training data from the target itself: prompts, its sampled answers, shards on disk."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.request import Completion, Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.text.prompt_file import read_prompts
from dspark_jax.text.template_digest import template_digest
from dspark_jax.text.text import Text
from train.conversation import Conversation
from train.data import TokenSequence
from train.data_config import DataConfig, PromptsSection
from train.estimate import Probe, announce
from train.journal import Journal, Key, answer_all
from train.progress import progress_bar
from train.run_folder import versions
from train.scalars import write_scalars
from train.shards import FORMAT, digest, shard_path, write_manifest, write_shard
from train.stopping import Stop

USER_TURNS, ANSWERS = range(2)
PROBE = "PROBE"


@dataclasses.dataclass
class Counts:
    """What a job did so far, in this attempt."""

    answers: int = 0
    tokens: int = 0
    documents: int = 0
    retemplated: int = 0
    outgrown: int = 0

    def told(self) -> str:
        """One sentence for the user."""
        return (
            f"{self.documents} documents; {self.retemplated} turns began a new document, because "
            f"the template writes earlier turns otherwise; {self.outgrown} turns left no room for "
            "an answer"
        )


def build_dataset(
    config: DataConfig,
    target: LoadedTarget,
    *,
    resume: bool = False,
    estimate_only: bool = False,
    stop: Stop | None = None,
) -> Path:
    """Write the data folder of ``config``, after an estimate of time and disk.

    Every answer has its own seed, fixed by the job's seed, the conversation and the turn: a
    resumed job writes what an unbroken one would have written. Answers are kept as they end;
    an attempt that is stopped or killed costs only those under way. Self-written user turns
    that are empty or too long are left out, and so are turns that leave no room for an answer.

    Args:
        resume: continue the folder of an earlier attempt.
        estimate_only: return after the estimate; the answers measured for it are kept.
        stop: entered by the caller; a signal then ends the job between two pieces of work.

    Raises:
        ValueError: a target without tokenizer or template, a faulty prompt file, a folder that
            holds the data of another job, too little room on the disk.
        FileExistsError: data without ``resume``; FileNotFoundError: no data with it.
        Stopped: a signal came.
    """
    text = target.text
    if text is None or not text.has_template:
        raise ValueError(f"target {target.name} has no chat template to write data with")
    folder = Path(config.answers.output)
    prompts = None if config.prompts is None else _user_turns(config.prompts)
    total = _conversation_count(config, prompts)
    session = Generator(
        target,
        None,
        mode="off",
        batch=min(config.answers.batch, total, config.answers.shard_size),
        max_context=config.answers.max_context,
    )
    write_manifest(folder, _manifest(config, target.name, text, prompts), resume=resume)
    job = _Job(config, session, text, prompts, stop or Stop())
    size = config.answers.shard_size
    shards = [range(first, min(first + size, total)) for first in range(0, total, size)]
    pending = [n for n in range(len(shards)) if not shard_path(folder, n).exists()]
    if pending:
        job.probe(folder, {n: shards[n] for n in pending}, target)
    if estimate_only:
        return folder
    done = sum(len(shard) for n, shard in enumerate(shards) if n not in pending)
    with progress_bar("conversations", total, done) as advance:
        began, ended = time.monotonic(), 0

        def show(last: bool) -> None:
            nonlocal ended
            ended += last
            rate = job.counts.tokens / (time.monotonic() - began)
            advance(int(last), f"{job.counts.answers} answers, {rate:,.0f} tokens/s")

        job.on_answer = show
        for number in pending:
            journal = Journal(_journal_path(folder, number))
            before, ended = dataclasses.replace(job.counts), 0
            try:
                sequences = job.converse(shards[number], journal)
            finally:
                journal.close()
            write_shard(folder, number, sequences)
            journal.remove()
            job.counts.documents += len(sequences)
            # Answers of earlier attempts, and conversations that ended early.
            advance(len(shards[number]) - ended)
            write_scalars(folder, number + 1, _shard_figures(before, job.counts, sequences, began))
    print(job.counts.told())
    return folder


class _Job:
    """The conversations of one job: who asks what, and how it is answered."""

    def __init__(
        self,
        config: DataConfig,
        session: Generator,
        text: Text,
        prompts: Sequence[tuple[str, ...]] | None,
        stop: Stop,
    ) -> None:
        self.counts = Counts()
        self.on_answer: Callable[[bool], None] = lambda last: None
        self._config = config
        self._session = session
        self._text = text
        self._prompts = prompts
        self._stop = stop

    def probe(self, folder: Path, pending: dict[int, range], target: LoadedTarget) -> None:
        """Answer one batch of the first pending shard, keep it, and tell what all will take."""
        number, shard = next(iter(pending.items()))
        journal = Journal(_journal_path(folder, number))
        sample = shard[: self._session.batch]
        known = len(journal.kept)
        self._session.warmup(SamplingParams(temperature=self._config.answers.temperature))
        began = time.monotonic()
        try:
            with progress_bar("estimate", len(sample)) as advance:
                self.on_answer = lambda last: advance(int(last))
                documents = self.converse(sample, journal)
        finally:
            journal.close()
        measured = Probe(
            conversations=len(sample),
            seconds=None if known else time.monotonic() - began,
            documents=documents,
        )
        conversations = sum(len(indices) for indices in pending.values())
        hidden_size = getattr(target.config, "hidden_size", 0)
        announce(measured, conversations, len(pending), self._config, hidden_size)
        self.counts = Counts()

    def converse(self, indices: Sequence[int], journal: Journal) -> list[TokenSequence]:
        """The documents of these conversations, turn after turn, in order of their indices."""
        settings = self._config.answers
        if self._prompts is None:
            written = self._write_user_turns(indices, journal)
        else:
            written = {index: self._prompts[index % len(self._prompts)] for index in indices}
        conversations = {
            index: Conversation(self._text, turns, settings.thinking)
            for index, turns in written.items()
        }
        live, turn = dict(conversations), 0
        while live:
            self._stop.check()
            requests: dict[Key, Request] = {}
            for index, conversation in list(live.items()):
                prompt_ids = conversation.ask(turn) if turn < len(conversation.turns) else None
                if prompt_ids is None:
                    del live[index]
                elif len(prompt_ids) + settings.max_new_tokens > settings.max_context:
                    self.counts.outgrown += len(conversation.turns) - turn
                    del live[index]
                else:
                    key = (ANSWERS, index, turn)
                    requests[key] = self._request(
                        prompt_ids, key, settings.temperature, settings.max_new_tokens
                    )
            for (_, index, _), done in self._answer(requests, journal).items():
                live[index].hear(done)
            turn += 1
        self.counts.retemplated += sum(one.retemplated for one in conversations.values())
        return [document for one in conversations.values() for document in one.documents()]

    def _write_user_turns(
        self, indices: Sequence[int], journal: Journal
    ) -> dict[int, tuple[str, ...]]:
        """User messages sampled from an opened user turn; unfinished and empty ones are dropped."""
        assert self._config.self_prompting is not None
        opening = open_user_turn(self._text, self._config.answers.thinking)
        limit = self._config.self_prompting.max_prompt_tokens
        keys = [(USER_TURNS, index, 0) for index in indices]
        requests = {key: self._request(opening, key, 1.0, limit) for key in keys}
        written = {
            index: (done.text or "").strip()
            for (_, index, _), done in self._answer(requests, journal).items()
            if done.finish_reason == "stop"
        }
        return {index: (message,) for index, message in written.items() if message}

    def _request(
        self, prompt_ids: Sequence[int], key: Key, temperature: float, limit: int
    ) -> Request:
        seed = request_seed(self._config.answers.seed, *key)
        return Request(
            prompt_ids,
            SamplingParams(temperature=temperature, seed=seed, max_new_tokens=limit),
        )

    def _answer(self, requests: dict[Key, Request], journal: Journal) -> dict[Key, Completion]:
        def count(key: Key, done: Completion) -> None:
            role, index, turn = key
            turns = 1 if self._prompts is None else len(self._prompts[index % len(self._prompts)])
            self.counts.answers += 1
            self.counts.tokens += len(done.token_ids)
            self.on_answer(role == ANSWERS and turn == turns - 1)

        return answer_all(self._session, requests, journal, self._stop, count)


def _shard_figures(
    before: Counts, after: Counts, sequences: Sequence[TokenSequence], began: float
) -> dict[str, float]:
    """What TensorBoard shows of a shard."""
    supervised = [int(sequence.loss_mask.sum()) for sequence in sequences]
    return {
        "documents": len(sequences),
        "answer_tokens": sum(supervised),
        "answer_tokens_a_document": float(np.mean(supervised)) if supervised else 0.0,
        "turns_retemplated": after.retemplated - before.retemplated,
        "turns_outgrown": after.outgrown - before.outgrown,
        "tokens_a_second": after.tokens / (time.monotonic() - began),
    }


def _journal_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.answers.jsonl"


def open_user_turn(text: Text, thinking: bool | None = None) -> list[int]:
    """Ids of a conversation up to where the user's message begins, system part included."""
    message = {"role": "user", "content": PROBE}
    rendered = text.render([message], add_generation_prompt=False, thinking=thinking)
    return text.encode(rendered[: rendered.index(PROBE)])


def request_seed(seed: int, *key: int) -> int:
    """A 32-bit seed for one request of a job; the same in every run.

    Trailing zeros of ``key`` change nothing (NumPy's rule): turn 0 has the seed of its
    conversation.
    """
    return int(np.random.SeedSequence([seed, *key]).generate_state(1)[0])


def _conversation_count(config: DataConfig, prompts: Sequence[tuple[str, ...]] | None) -> int:
    if prompts is None:
        assert config.self_prompting is not None
        return config.self_prompting.count
    assert config.prompts is not None
    return len(prompts) * config.prompts.samples_per_prompt


def _user_turns(section: PromptsSection) -> list[tuple[str, ...]]:
    """User messages of all files, a conversation an entry, in order."""
    found = []
    for file in section.files:
        for number, line in enumerate(read_prompts(Path(file)), 1):
            if "turns" not in line:
                raise ValueError(f"{file}, prompt {number}: wanted turns, a list of strings")
            found.append(tuple(line["turns"]))
    return found


def _manifest(
    config: DataConfig, target: str, text: Text, prompts: Sequence[tuple[str, ...]] | None
) -> dict[str, object]:
    """What the data is; everything here except versions must match for a job to continue."""
    job = dataclasses.asdict(config)
    for name in ("output", "batch"):
        del job["answers"][name]
    del job["features"]
    return {
        "target": target,
        "template_sha256": template_digest(text, config.answers.thinking),
        "thinking": config.answers.thinking,
        "temperature": config.answers.temperature,
        "prompts": "self-prompting" if prompts is None else digest(repr(prompts)),
        "format": FORMAT,
        "job": job,
        "versions": versions(),
    }
