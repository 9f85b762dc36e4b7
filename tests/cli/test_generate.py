"""`dspark generate` on a target that counts: token i is followed by i + 1."""

import json
import signal
from pathlib import Path

import jax.numpy as jnp
import pytest

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.cli import generate as command
from dspark_jax.cli.main import main
from dspark_jax.testing.markov import MarkovTargetConfig, MarkovTargetWeights
from dspark_jax.text.prompt_file import read_prompts
from dspark_jax.text.stream import TextStream

VOCAB = 64
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>"


class Letters:
    """Token i is letter i; a chat is the users' and the model's texts, each in brackets."""

    def __init__(self, has_template=True):
        self.has_template = has_template

    def encode(self, text):
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[i] for i in ids)

    def stream(self):
        return TextStream(self.decode)

    def chat_ids(self, messages):
        ids = self.encode("".join(f"<{message['content']}>" for message in messages))
        return [*ids[:-1], ids[-2]]  # the answer continues the last letter


class CountingConfig(MarkovTargetConfig):
    """A counting target with a context."""

    max_position_embeddings = 512


@pytest.fixture
def counting(monkeypatch):
    """`--target counting` loads the toy; returns what was loaded with which dtype."""
    asked = []
    weights = MarkovTargetWeights(20.0 * jnp.roll(jnp.eye(VOCAB), 1, axis=1))

    def load(name, dtype):
        asked.append((name, dtype))
        text = Letters(has_template=name == "counting")
        return LoadedTarget(CountingConfig(VOCAB), weights, text, (), name)

    monkeypatch.setattr(command, "load_target", load)
    return asked


def run(*flags, target="counting", tokens="3"):
    return main(["generate", "--target", target, "--max-new-tokens", tokens, *flags])


def prompt_file(path, *lines):
    file = path / "prompts.jsonl"
    file.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(file)


def test_a_single_prompt_goes_through_the_template_and_streams(counting, capsys):
    assert run("--prompt", "5", "--dtype", "float32") == 0
    assert capsys.readouterr().out == "678\n"
    assert counting == [("counting", "float32")]


def test_raw_and_models_without_template_read_the_prompt_as_it_is(counting, capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    for flags, target in ((["--raw"], "counting"), ([], "bare")):
        assert run("--prompt", "45", "--json", str(out), *flags, target=target) == 0
        record = json.loads(out.read_text())
        assert record["prompt_ids"] == [4, 5]
        assert record["text"] == "678"
    assert capsys.readouterr().out == "678\n678\n"


def test_a_file_gives_one_line_a_prompt_in_order(counting, tmp_path):
    prompts = prompt_file(
        tmp_path, {"turns": ["1", "a"]}, "", {"prompt": "7"}, {"turns": ["c"]}, {"prompt": "0"}
    )
    out = tmp_path / "out.jsonl"
    assert run("--prompts", prompts, "--batch", "2", "--json", str(out)) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["text"] for record in records] == ["234", "89a", "def", "123"]
    assert set(records[0]) == {
        "prompt_ids",
        "token_ids",
        "text",
        "finish_reason",
        "accepted_length",
        "windows",
    }
    assert records[0]["token_ids"] == [2, 3, 4]
    assert records[0]["finish_reason"] == "length"
    assert records[0]["accepted_length"] == 1.0
    assert records[0]["windows"] == [0, 0, 0]


def test_without_an_output_file_answers_are_printed_in_order(counting, tmp_path, capsys):
    prompts = prompt_file(tmp_path, {"prompt": "1"}, {"prompt": "a"})
    assert run("--prompts", prompts) == 0
    assert capsys.readouterr().out == "234\nbcd\n"


def test_all_turns_are_answered_with_the_earlier_answers_in_the_conversation(counting, tmp_path):
    prompts = prompt_file(tmp_path, {"turns": ["1", "a"]}, {"turns": ["5"]})
    out = tmp_path / "out.jsonl"
    assert run("--prompts", prompts, "--all-turns", "--json", str(out)) == 0
    two, one = (json.loads(line) for line in out.read_text().splitlines())
    assert one["text"] == "678"
    assert "earlier" not in one
    assert two["text"] == "bcd"
    assert [record["text"] for record in two["earlier"]] == ["234"]
    assert Letters().decode(two["prompt_ids"]) == "<1><234><aa"


def test_a_conversation_that_outgrows_its_context_keeps_its_answers(counting, tmp_path):
    prompts = prompt_file(tmp_path, {"turns": ["1", "abcdefgh", "a"]}, {"turns": ["5", "6"]})
    out = tmp_path / "out.jsonl"
    flags = ["--prompts", prompts, "--all-turns", "--max-context", "14", "--json", str(out)]
    assert run(*flags) == 0
    three, two = (json.loads(line) for line in out.read_text().splitlines())
    assert [record["text"] for record in three["earlier"]] == ["234", ""]
    assert (three["finish_reason"], three["token_ids"]) == ("context", [])
    assert two["text"] == "789"


@pytest.mark.usefixtures("listening_to_ctrl_c")
def test_ctrl_c_ends_every_conversation(counting, tmp_path, monkeypatch):
    prompts = prompt_file(tmp_path, {"turns": ["1", "2"]}, {"turns": ["3", "4"]})
    out = tmp_path / "out.jsonl"
    advance = command.Progress.advance

    def press_ctrl_c(*arguments):
        monkeypatch.setattr(command.Progress, "advance", advance)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command.Progress, "advance", press_ctrl_c)
    flags = ["--prompts", prompts, "--all-turns", "--batch", "1", "--json", str(out)]
    assert run(*flags) == 130
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    # the second prompt was on its way when the first was announced
    assert (first["text"], second["text"]) == ("234", "456")
    assert "earlier" not in first
    assert "earlier" not in second


def test_stops_and_logprobs_reach_the_request(counting, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--prompt", "0", "--stop", "zz", "--stop", "45", "--logprobs", "2", "--json", str(out)]
    assert run(*flags, tokens="20") == 0
    record = json.loads(out.read_text())
    assert record["text"] == "123"
    assert record["token_ids"] == [1, 2, 3, 4, 5]
    assert record["finish_reason"] == "stop"
    assert [one["token_id"] for one in record["logprobs"]] == record["token_ids"]
    assert all(len(one["top"]) == 2 for one in record["logprobs"])
    assert run("--prompt", "0", "--stop-token-ids", "3", "9", "--json", str(out), tokens="20") == 0
    assert json.loads(out.read_text())["token_ids"] == [1, 2, 3]


@pytest.mark.usefixtures("listening_to_ctrl_c")
def test_an_interrupted_command_says_so_in_its_exit_code(counting, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"

    write = command.sys.stdout.write

    def press_ctrl_c(piece):
        monkeypatch.setattr(command.sys.stdout, "write", write)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command.sys.stdout, "write", press_ctrl_c)
    assert run("--prompt", "0", "--json", str(out), tokens="60") == 130
    assert json.loads(out.read_text())["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give one of --prompt"),
        (["--prompt", "1", "--prompts", "x"], "give one of --prompt"),
        (["--prompt", "1", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", "1", "--top-p", "2"], "top_p is 2.0"),
        (["--prompt", "1", "--mode", "compact"], "without a drafter"),
        (["--prompt", "1", "--max-context", "1000"], "max_context is 1000, but the target"),
        (["--prompt", "12345", "--raw", "--max-context", "4"], "5 tokens; a context of 4"),
        (["--prompt", "", "--raw"], "--prompt is empty"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompts", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["--prompt", "1", "--k", "3"], 'k is 3 in mode "off"'),
        (["--prompt", "1", "--policy", "causal"], "policy is 'causal' in mode 'off'"),
        (["--prompt", "1", "--cost-table", "x.json"], "a cost table is given and mode is 'off'"),
        (["--prompt", "1", "--calibration", "x.json"], "a calibration is given and mode is"),
        (["--prompt", "1", "--record-confidences", "x.jsonl"], "record_confidences needs"),
        (["--prompt", "1", "--top-p", "0.9"], "top_p 0.9 at temperature 0, where nothing is"),
        (["--prompt", "1", "--top-k", "5"], "top_k is 5 and top_p 1 at temperature 0"),
        (["--prompt", "1", "--all-turns"], "--all-turns is for --prompts"),
        (["--prompts", "x.jsonl", "--raw"], "--raw is for --prompt;"),
    ],
)
def test_a_wrong_command_line_is_one_line_of_error(counting, capsys, flags, message):
    assert run(*flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: wanted turns"),
        ('{"turns": []}', "line 2: wanted turns"),
        ('{"turns": [1]}', "line 2: wanted turns"),
        ('{"prompt": 3}', "line 2: wanted turns"),
        ('{"prompt": ""}', "line 2: an empty prompt"),
        ('{"turns": ["1", ""]}', "line 2: an empty prompt or turn"),
    ],
)
def test_a_bad_line_of_a_prompt_file_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(Path(prompt_file(tmp_path, {"prompt": "1"}, line)))


def test_only_newlines_end_a_line_of_a_prompt_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('{"prompt": "a\u2028b\u0085c"}\r\n\r\n{"prompt": "d"}\r\n'.encode())
    assert read_prompts(file) == [{"prompt": "a\u2028b\u0085c"}, {"prompt": "d"}]


def test_a_prompt_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"prompts\.jsonl is not a text in UTF-8"):
        read_prompts(file)


def test_an_empty_prompt_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(Path(prompt_file(tmp_path, "")))
