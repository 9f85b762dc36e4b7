"""Data from the target: the ids of serving, exact masks, resumption without loss or doubling."""

import dataclasses
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dspark_jax.text.chat_template import ChatTemplate
from dspark_jax.text.text import Text
from train import answers
from train.answers import (
    AnswersConfig,
    AnswersSection,
    PromptsSection,
    SelfPromptingSection,
    build_dataset,
    open_user_turn,
    request_seed,
)
from train.config import TargetSection
from train.data import read_dataset

TEMPLATE = (
    "{% for message in messages %}{{ '<start> ' + message['role'] + ' ' + message['content'] "
    "+ ' <end> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<start> assistant ' }}{% endif %}"
)
STOP = 2


@pytest.fixture(scope="module")
def chatty(tiny_target):
    """The tiny target with a vocabulary of words and a chat template."""
    words = ["<pad>", "<start>", "<end>", "user", "assistant", *(f"w{i}" for i in range(155))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<start>", "<end>"])
    text = Text(tokenizer, ChatTemplate(TEMPLATE, {}, "test"))
    return dataclasses.replace(tiny_target, text=text, stop_token_ids=(STOP,))


@pytest.fixture
def job(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"turns": [f"w{i} w{i + 1}", "second turn"]} for i in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return AnswersConfig(
        target=TargetSection("tiny"),
        answers=AnswersSection(
            output=str(tmp_path / "data"),
            max_new_tokens=12,
            max_context=32,
            batch=4,
            shard_size=3,
        ),
        prompts=PromptsSection(files=(str(prompts),), samples_per_prompt=2),
    )


def all_documents(folder):
    dataset = read_dataset(folder)
    return [
        (d.tokens.tolist(), d.loss_mask.tolist()) for d in (dataset[i] for i in range(len(dataset)))
    ]


def test_answers_follow_the_served_prompt_and_alone_are_supervised(chatty, job):
    documents = all_documents(build_dataset(job, chatty))
    assert len(documents) == 8
    for index, (tokens, mask) in enumerate(documents):
        message = {"role": "user", "content": f"w{index % 4} w{index % 4 + 1}"}
        prompt = chatty.text.chat_ids([message])
        assert tokens[: len(prompt)] == prompt
        assert mask == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
        answer = tokens[len(prompt) :]
        assert len(answer) == 12 or answer[-1] == STOP
        assert STOP not in answer[:-1]
    assert documents[0] != documents[4]


def test_a_job_that_crashed_continues_to_the_same_data(chatty, job, tmp_path, monkeypatch):
    whole = all_documents(build_dataset(job, chatty))
    section = dataclasses.replace(job.answers, output=str(tmp_path / "broken"))
    broken = dataclasses.replace(job, answers=section)

    def full_disk(folder, number, sequences):
        if number == 1:
            raise OSError("disk full")
        write(folder, number, sequences)

    write = answers.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(answers, "write_shard", full_disk)
        with pytest.raises(OSError, match="disk full"):
            build_dataset(broken, chatty)
    assert len(read_dataset(tmp_path / "broken")) == 3
    assert all_documents(build_dataset(broken, chatty)) == whole


def test_another_seed_does_not_continue_a_folder(chatty, job):
    build_dataset(job, chatty)
    other = dataclasses.replace(job, answers=dataclasses.replace(job.answers, seed=7))
    with pytest.raises(ValueError, match="choose another output folder"):
        build_dataset(other, chatty)


def test_the_model_writes_its_own_user_turns(chatty, job):
    assert open_user_turn(chatty.text) == chatty.text.encode("<start> user")
    section = SelfPromptingSection(count=40, max_prompt_tokens=40)
    answers_section = dataclasses.replace(job.answers, max_context=96, shard_size=40, batch=8)
    alone = dataclasses.replace(job, prompts=None, self_prompting=section, answers=answers_section)
    documents = all_documents(build_dataset(alone, chatty))
    assert documents
    for tokens, mask in documents:
        prompt = tokens[: mask.index(True)]
        message = chatty.text.decode(prompt).removeprefix("user").removesuffix("assistant")
        assert prompt == chatty.text.chat_ids([{"role": "user", "content": message.strip()}])
    assert len({tuple(tokens) for tokens, _ in documents}) == len(documents)


def test_request_seeds_differ_by_job_role_and_index():
    seeds = {request_seed(s, role, i) for s in (1, 2) for role in (0, 1) for i in range(100)}
    assert len(seeds) == 400
    assert max(seeds) < 2**32


def test_one_source_of_prompts_is_wanted(job):
    with pytest.raises(ValueError, match="one of the sections"):
        dataclasses.replace(job, prompts=None)


def test_a_target_without_template_is_refused(tiny_target, job):
    with pytest.raises(ValueError, match="no chat template"):
        build_dataset(job, tiny_target)
