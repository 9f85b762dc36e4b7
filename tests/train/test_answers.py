"""Data from the target: the ids of serving, exact masks, resumption without loss or doubling."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest

from dspark_jax.decode.request import Completion
from dspark_jax.text.text import Text
from train import answers
from train.answers import build_dataset, open_user_turn, request_seed
from train.config import TargetSection
from train.conversation import Conversation
from train.data_config import (
    AnswersSection,
    DataConfig,
    PromptsSection,
    SelfPromptingSection,
)
from train.shards import read_dataset, shard_path
from train.stopping import Stop, Stopped

STOP = 2


def make_job(folder):
    """Four conversations, the even ones of two turns, two samples each, in three shards."""
    prompts = folder / "prompts.jsonl"
    lines = [{"turns": [f"w{i} w{i + 1}", f"w{i + 20}"][: 2 - i % 2]} for i in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataConfig(
        target=TargetSection("tiny"),
        answers=AnswersSection(
            output=str(folder / "data"),
            max_new_tokens=6,
            max_context=32,
            batch=4,
            shard_size=3,
        ),
        prompts=PromptsSection(files=(str(prompts),), samples_per_prompt=2),
    )


@pytest.fixture
def job(tmp_path):
    return make_job(tmp_path)


@pytest.fixture(scope="module")
def whole(chatty, tmp_path_factory):
    """Documents of the job that nothing stopped."""
    return all_documents(build_dataset(make_job(tmp_path_factory.mktemp("whole")), chatty))


def at(job, folder, **changes):
    section = dataclasses.replace(job.answers, output=str(folder), **changes)
    return dataclasses.replace(job, answers=section)


def all_documents(folder):
    dataset = read_dataset(folder)
    return [
        (d.tokens.tolist(), d.loss_mask.tolist()) for d in (dataset[i] for i in range(len(dataset)))
    ]


def answered(tokens, mask):
    """The supervised runs of a document, each with everything before it."""
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return [(tokens[:start], tokens[start:end]) for start, end in edges.reshape(-1, 2)]


def test_every_answer_follows_the_ids_that_serving_would_send_and_alone_is_supervised(
    chatty, job, monkeypatch
):
    served, chat_ids = [], Text.chat_ids

    def send(text, messages, thinking=None):
        served.append(chat_ids(text, messages, thinking))
        return served[-1]

    monkeypatch.setattr(Text, "chat_ids", send)
    documents = all_documents(build_dataset(job, chatty))
    turns = [turn for document in documents for turn in answered(*document)]
    assert len(turns) == 12
    for before, answer in turns:
        assert before in served
        assert len(answer) == 6 or answer[-1] == STOP
        assert STOP not in answer[:-1]
    for i in range(4):
        message = {"role": "user", "content": f"w{i} w{i + 1}"}
        prompt = chat_ids(chatty.text, [message])
        assert sum(tokens[: len(prompt)] == prompt for tokens, _ in documents) >= 2
    # two samples of a prompt differ
    assert len({tuple(tokens) for tokens, _ in documents}) == len(documents)


def test_a_conversation_is_one_document_when_serving_would_see_those_very_ids(chatty):
    text = chatty.text
    talk = Conversation(text, ["w1 w2", "w3"], None)
    first = talk.ask(0)
    talk.hear(reply(text, "w7 w8"))
    second = talk.ask(1)
    talk.hear(reply(text, "w9"))
    [document] = talk.documents()
    answer = [*text.encode("w7 w8"), STOP]
    assert second[: len(first) + 3] == [*first, *answer]
    assert document.tokens.tolist() == [*second, *text.encode("w9"), STOP]
    supervised = np.flatnonzero(document.loss_mask).tolist()
    assert supervised == [
        *range(len(first), len(first) + 3),
        *range(len(second), len(second) + 2),
    ]
    assert talk.retemplated == 0


def test_an_answer_cut_at_its_limit_gets_its_end_of_turn_from_the_template_unsupervised(chatty):
    text = chatty.text
    talk = Conversation(text, ["w1", "w3"], None)
    first = talk.ask(0)
    talk.hear(reply(text, "w7 w8", finish_reason="length"))
    talk.ask(1)
    talk.hear(reply(text, "w9"))
    [document] = talk.documents()
    assert document.tokens[len(first) + 2] == STOP
    assert document.loss_mask[len(first) : len(first) + 3].tolist() == [True, True, False]


def test_a_template_that_rewrites_earlier_turns_begins_a_new_document(forgetful_text):
    text = forgetful_text
    talk = Conversation(text, ["w1", "w3", "w4"], None)
    first = talk.ask(0)
    talk.hear(reply(text, "w5 w0 w6"))
    second = talk.ask(1)
    talk.hear(reply(text, "w7"))
    third = talk.ask(2)
    talk.hear(reply(text, "w8"))
    one, other = talk.documents()
    assert talk.retemplated == 1
    assert one.tokens.tolist() == [*first, *text.encode("w5 w0 w6"), STOP]
    assert text.encode("w0")[0] not in second
    assert other.tokens.tolist() == [*third, *text.encode("w8"), STOP]
    # the thoughts that the template dropped are not supervised a second time
    assert not other.loss_mask[: len(second)].any()
    assert other.loss_mask.sum() == 4


def reply(text, words, finish_reason="stop"):
    ids = tuple(text.encode(words)) + ((STOP,) if finish_reason == "stop" else ())
    return Completion((), ids, words, finish_reason, (), (), (), None)


def test_a_turn_without_room_for_its_answer_ends_the_conversation(chatty, job, capsys):
    documents = all_documents(build_dataset(at(job, job.answers.output, max_context=20), chatty))
    assert len(documents) == 8
    assert all(len(answered(*document)) == 1 for document in documents)
    assert "4 turns left no room" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("listening_to_ctrl_c")
def test_a_stopped_job_keeps_its_answers_and_resumes_to_the_same_data(
    chatty, job, whole, tmp_path, monkeypatch, number
):
    broken = at(job, tmp_path / "broken")
    add, added = answers.Journal.add, []

    def interrupted(journal, key, done):
        add(journal, key, done)
        added.append(key)
        if len(added) == 6:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(answers.Journal, "add", interrupted)
        with Stop() as stop, pytest.raises(Stopped) as stopped:
            build_dataset(broken, chatty, stop=stop)
    assert stopped.value.code == 128 + number
    before = set(added)
    assert len(before) == len(added) >= 6

    def counted(journal, key, done):
        add(journal, key, done)
        added.append(key)

    monkeypatch.setattr(answers.Journal, "add", counted)
    assert all_documents(build_dataset(broken, chatty, resume=True)) == whole
    assert len(added) == len(set(added)) == 12
    assert not list((tmp_path / "broken").glob("*.jsonl"))


def test_a_signal_while_the_last_answers_are_on_their_way_is_not_missed(
    chatty, job, tmp_path, monkeypatch
):
    add = answers.Journal.add

    def interrupted(journal, key, done):
        add(journal, key, done)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(answers.Journal, "add", interrupted)
    with Stop() as stop, pytest.raises(Stopped):
        build_dataset(at(job, tmp_path / "one", batch=4, shard_size=8), chatty, stop=stop)


def test_a_crash_in_the_middle_of_writing_costs_nothing_and_doubles_nothing(
    chatty, job, whole, tmp_path, monkeypatch
):
    broken = at(job, tmp_path / "broken")

    def full_disk(folder, number, sequences):
        if number == 1:
            raise OSError("disk full")
        write(folder, number, sequences)

    write = answers.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(answers, "write_shard", full_disk)
        with pytest.raises(OSError, match="disk full"):
            build_dataset(broken, chatty)
    [journal] = (tmp_path / "broken").glob("*.answers.jsonl")
    journal.write_bytes(journal.read_bytes()[:-20])
    assert shard_path(tmp_path / "broken", 0).exists()
    assert all_documents(build_dataset(broken, chatty, resume=True)) == whole


def test_a_journal_with_a_line_of_something_else_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1 is no answer"):
        answers.Journal(tmp_path / "x.jsonl")


def test_the_estimate_comes_first_and_its_answers_are_kept(chatty, job, whole, capsys):
    folder = build_dataset(job, chatty, estimate_only=True)
    told = capsys.readouterr().out
    assert "estimate: 8 conversations" in told
    assert not list(folder.glob("shard-*.array_record"))
    [journal] = folder.glob("*.answers.jsonl")
    assert len(journal.read_text().splitlines()) >= 3
    assert all_documents(build_dataset(job, chatty, resume=True)) == whole


def test_another_seed_does_not_continue_a_folder(chatty, job):
    build_dataset(job, chatty)
    with pytest.raises(FileExistsError, match="--resume"):
        build_dataset(job, chatty)
    other = dataclasses.replace(job, answers=dataclasses.replace(job.answers, seed=7))
    with pytest.raises(ValueError, match="choose another output folder"):
        build_dataset(other, chatty, resume=True)


def test_the_manifest_holds_config_and_versions_and_tensorboard_the_figures(chatty, job):
    folder = build_dataset(job, chatty)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["job"]["answers"]["seed"] == 42
    assert manifest["thinking"] is None
    assert manifest["versions"]["jax"]
    assert list((folder / "tensorboard").iterdir())


def test_the_model_writes_its_own_user_turns(chatty, job):
    assert open_user_turn(chatty.text) == chatty.text.encode("<start> user")
    section = SelfPromptingSection(count=40, max_prompt_tokens=40)
    wide = at(job, job.answers.output, max_context=96, shard_size=40, batch=8)
    alone = dataclasses.replace(wide, prompts=None, self_prompting=section)
    documents = all_documents(build_dataset(alone, chatty))
    assert documents
    for tokens, mask in documents:
        prompt = tokens[: mask.index(True)]
        message = chatty.text.decode(prompt).removeprefix("user").removesuffix("assistant")
        assert prompt == chatty.text.chat_ids([{"role": "user", "content": message.strip()}])
    assert len({tuple(tokens) for tokens, _ in documents}) == len(documents)


def test_request_seeds_differ_by_job_role_and_index_and_turn_0_has_the_conversations_own():
    seeds = {request_seed(s, role, i) for s in (1, 2) for role in (0, 1) for i in range(100)}
    assert len(seeds) == 400
    assert max(seeds) < 2**32
    assert request_seed(42, 1, 7, 0) == request_seed(42, 1, 7)
    assert len({request_seed(42, 1, i, turn) for i in range(50) for turn in range(4)}) == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, r"answers\.batch is 0"),
        ({"temperature": -1.0}, r"answers\.temperature is -1\.0"),
        ({"seed": -1}, r"answers\.seed is -1"),
        ({"max_new_tokens": 32}, r"max_new_tokens 32 must be below answers\.max_context 32"),
    ],
)
def test_a_wrong_config_is_refused_by_name(job, change, message):
    with pytest.raises(ValueError, match=message):
        at(job, "x", **change)


def test_one_source_of_prompts_is_wanted(job):
    with pytest.raises(ValueError, match="one of the sections"):
        dataclasses.replace(job, prompts=None)


def test_a_target_without_template_is_refused(tiny_target, job):
    with pytest.raises(ValueError, match="no chat template"):
        build_dataset(job, tiny_target)


def test_a_prompt_without_turns_is_named(chatty, job, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["w1"]}\n{"prompt": "w1"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl, prompt 2: wanted turns"):
        build_dataset(job, chatty)
