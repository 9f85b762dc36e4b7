"""Sessions on a target that counts: token i is followed by i + 1, so every answer is known."""

import dataclasses
import json
import logging
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibration.file import identity
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.decode.setup import default_mode, tables_for
from dspark_jax.decode.slots import SlotPrograms
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.models.config import DenseConfig
from dspark_jax.schedule.cost import no_costs
from dspark_jax.testing.markov import (
    MarkovDrafterConfig,
    MarkovDrafterWeights,
    MarkovTargetConfig,
    MarkovTargetWeights,
)
from dspark_jax.text.stream import TextStream

VOCAB, BLOCK, CONTEXT = 64, 4, 64
MODES = ("static", "compact", "cap-accept")
COSTS = no_costs(2, BLOCK)


class Letters:
    """Token i is one byte of a text that holds characters of one to four bytes."""

    has_template = False
    table = ("0123456789é€😀END" * 4).encode()[:VOCAB]

    def encode(self, text):
        return [self.table.index(byte) for byte in text.encode()]

    def decode(self, ids):
        return bytes(self.table[i] for i in ids).decode("utf-8", errors="replace")

    def stream(self):
        return TextStream(self.decode)


def counting(sharpness=20.0, shift=1):
    return sharpness * jnp.roll(jnp.eye(VOCAB), shift, axis=1)


def target(logits=None, stops=(), text=True):
    weights = MarkovTargetWeights(counting() if logits is None else logits)
    return LoadedTarget(
        MarkovTargetConfig(VOCAB), weights, Letters() if text else None, tuple(stops), "toy"
    )


def drafter(logits=None, confidence=2.0, head=True):
    config = MarkovDrafterConfig(VOCAB, BLOCK, enable_confidence_head=head)
    table = counting() if logits is None else logits
    weights = MarkovDrafterWeights(table, jnp.full((BLOCK, VOCAB), confidence))
    return LoadedDrafter(config, weights, "toy-drafter")


def noisy(seed):
    """A target or drafter whose choices are open."""
    return 1.5 * jax.random.normal(jax.random.key(seed), (VOCAB, VOCAB))


def session(pair=True, **options):
    """One bucket, because every bucket is a program to compile; ``buckets=None`` has them all."""
    options = {"batch": 2, "max_context": CONTEXT, **options}
    pair = drafter() if pair is True else pair
    if (options.get("mode") or default_mode(pair)) == "compact":
        options.setdefault("buckets", (options["batch"] * (BLOCK + 1),))
    return Generator(options.pop("target", target()), pair, **options)


@pytest.fixture(scope="module")
def oracle():
    """A drafter that is always right, windows of full blocks."""
    return session()


def ask(start, count=10, **params):
    return Request([start], SamplingParams(max_new_tokens=count, **params))


def test_every_request_is_answered_in_order_whatever_the_batch(oracle):
    requests = [ask(i, count) for i, count in enumerate((3, 1, 20, 7, 8, 9, 2, 1, 30))]
    answers = oracle.generate(requests)
    for request, answer in zip(requests, answers, strict=True):
        first, count = request.prompt[0], request.params.max_new_tokens
        assert answer.token_ids == tuple(range(first + 1, first + 1 + count))
        assert answer.finish_reason == "length"
        assert sum(answer.commits) == count
        assert len(answer.windows) == len(answer.commits) == len(answer.accepted)


def test_a_cap_on_tokens_is_met_exactly(oracle):
    for cap in range(1, 11):
        (answer,) = oracle.generate([ask(0, cap)])
        assert len(answer.token_ids) == cap
        assert max(answer.windows) <= cap - 1


@pytest.mark.parametrize("inside", range(1, 10))
def test_a_stop_id_ends_the_answer_wherever_it_falls_in_a_block(oracle, inside):
    (answer,) = oracle.generate([ask(0, 40, stop_token_ids=(inside,))])
    assert answer.token_ids == tuple(range(1, inside + 1))
    assert answer.finish_reason == "stop"
    assert answer.text == Letters().decode(range(1, inside))
    assert sum(answer.commits) == len(answer.token_ids)


def test_a_stop_inside_a_block_counts_drafts_up_to_it_and_no_bonus(oracle):
    (answer,) = oracle.generate([ask(0, 40, stop_token_ids=(3,))])
    assert answer.accepted_length == 3
    assert answer.proposed == (3,)


def test_every_stop_id_of_the_target_ends_an_answer_even_as_first_token():
    stopping = session(target=target(stops=(7, 9)))
    first, later = stopping.generate([ask(8), ask(0, 30)])
    assert (first.token_ids, first.finish_reason) == ((9,), "stop")
    assert later.token_ids == tuple(range(1, 8))


@pytest.mark.parametrize("mode", ["off", *MODES])
@pytest.mark.parametrize("wrong", [False, True])
def test_every_mode_gives_the_plain_answer_with_the_best_and_the_worst_drafter(mode, wrong):
    pair = drafter(counting(shift=2) if wrong else None)
    (answer,) = session(pair, mode=mode).generate([ask(5, 12)])
    assert answer.token_ids == tuple(range(6, 18))
    if mode == "off" or wrong:
        assert answer.accepted_length == 1
    else:
        assert answer.commits == (5, 5, 2)


def test_limits_beyond_int32_are_no_limits(oracle):
    (answer,) = oracle.generate([ask(0, 2**40, temperature=1.0, top_k=2**40)])
    assert answer.finish_reason == "context"
    assert len(answer.token_ids) == CONTEXT - 1


def test_the_context_ends_an_answer_at_its_last_row(oracle):
    prompt = list(range(30))
    (answer,) = oracle.generate([Request(prompt, SamplingParams(max_new_tokens=500))])
    assert len(prompt) + len(answer.token_ids) == CONTEXT
    assert answer.finish_reason == "context"


@pytest.mark.parametrize("length", [1, 2, 3, 33, 40, CONTEXT - 1])
def test_short_and_long_prompts_read_like_plain_decoding(oracle, length):
    prompt = [i % VOCAB for i in range(length)]
    (answer,) = oracle.generate([Request(prompt, SamplingParams(max_new_tokens=1))])
    assert answer.token_ids == (length % VOCAB,)
    assert answer.prompt_ids == tuple(prompt)


def test_greedy_answers_do_not_depend_on_the_seed():
    plain = session(None, target=target(noisy(1)))
    answers = plain.generate([ask(3, 20, seed=seed) for seed in range(10)])
    assert len({answer.token_ids for answer in answers}) == 1


@pytest.mark.parametrize("mode", ["off", "static"])
def test_a_seeded_request_is_the_same_alone_and_beside_unseeded_ones(mode):
    open_choice = session(drafter(noisy(2)), target=target(noisy(1)), mode=mode, batch=3)
    mixed = [ask(1, 20, temperature=1.0, seed=1), ask(2, 20, temperature=1.0)]
    mixed.append(ask(3, 20, temperature=1.0, seed=2))
    together = open_choice.generate(mixed)
    for index in (0, 2):
        (alone,) = open_choice.generate([mixed[index]])
        assert alone.token_ids == together[index].token_ids
    again = open_choice.generate(mixed)
    assert again[1].token_ids != together[1].token_ids


def test_greedy_and_sampled_requests_share_a_batch():
    open_choice = session(drafter(noisy(2)), target=target(noisy(1)))
    greedy, sampled, greedy_again = open_choice.generate(
        [ask(3, 20), ask(3, 20, temperature=1.0, seed=5), ask(3, 20, temperature=0.0, seed=9)]
    )
    assert greedy.token_ids == greedy_again.token_ids != sampled.token_ids
    (top,) = open_choice.generate([ask(3, 20, temperature=1.0, top_k=1)])
    assert top.token_ids == greedy.token_ids


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_those_of_plain_decoding(mode):
    request = ask(3, 40, logprobs=5)
    model = target(noisy(1))
    (plain,) = session(None, target=model).generate([request])
    (found,) = session(drafter(noisy(1) + 0.5 * noisy(2)), target=model, mode=mode).generate(
        [request]
    )
    assert found.token_ids == plain.token_ids
    assert found.accepted_length > 1
    assert len(found.logprobs) == len(found.token_ids) == 40
    row = jax.nn.log_softmax(model.weights.logits, axis=-1)
    previous = (3, *found.token_ids[:-1])
    for before, token_id, one, expected in zip(
        previous, found.token_ids, found.logprobs, plain.logprobs, strict=True
    ):
        assert one.token_id == token_id
        assert one.logprob < 0
        np.testing.assert_allclose(one.logprob, row[before, token_id], atol=1e-5)
        np.testing.assert_allclose(one.logprob, expected.logprob, atol=1e-5)
        assert len(one.top) == 5
        assert one.top[0] == (token_id, one.logprob)  # greedy: the best is the chosen one


def test_logprobs_stay_with_their_tokens_where_windows_are_trimmed():
    """Two requests of which one is trimmed: packed rows are not the rows of full blocks."""
    model = target(noisy(1))
    doubtful = drafter(noisy(1) + 0.5 * noisy(2), confidence=1.0)
    rows = jnp.arange(2 * (BLOCK + 1) + 1, dtype=jnp.float32)
    costs = COSTS.replace(verify=1 + 0.3 * rows[None], known=jnp.asarray(True))
    trimming = session(doubtful, target=model, cost_table=costs, buckets=(6, 10))
    requests = [ask(3, 30, logprobs=3), ask(9, 20, logprobs=3)]
    plain = session(None, target=model).generate(requests)
    found = trimming.generate(requests)
    windows = {window for answer in found for window in answer.windows[2:-2]}
    assert min(windows) < BLOCK
    assert max(windows) > 0
    for one, wanted in zip(found, plain, strict=True):
        assert one.token_ids == wanted.token_ids
        assert [row.token_id for row in one.logprobs] == list(one.token_ids)
        for row, expected in zip(one.logprobs, wanted.logprobs, strict=True):
            np.testing.assert_allclose(row.logprob, expected.logprob, atol=1e-5)
            assert [token for token, _ in row.top] == [token for token, _ in expected.top]


def test_each_request_gets_the_logprobs_it_asked_for(oracle):
    none, two = oracle.generate([ask(0, 4), ask(1, 4, logprobs=2)])
    assert none.logprobs is None
    assert [len(one.top) for one in two.logprobs] == [2, 2, 2, 2]


def test_a_stop_string_cuts_tokens_text_logprobs_and_counts_alike(oracle):
    request = ask(0, 60, stop=("END",), logprobs=0)
    other = ask(0, 60, stop=("5",))
    answer, short = oracle.generate([request, other])
    text = Letters().decode(range(1, VOCAB))
    end = Letters.table.index(b"END") + 3
    assert answer.finish_reason == short.finish_reason == "stop"
    assert answer.token_ids == tuple(range(1, end))
    assert answer.text == text[: text.index("END")]
    assert len(answer.logprobs) == sum(answer.commits) == len(answer.token_ids)
    assert short.token_ids == (1, 2, 3, 4, 5)
    assert short.text == "1234"
    assert short.commits == (5,)


def test_a_stop_string_frees_its_slot_for_the_next_request():
    narrow = session(batch=1, chunk_steps=2)
    answers = narrow.generate([ask(0, 60, stop=("3",)), ask(10, 5), ask(0, 60, stop=("4",))])
    assert [answer.finish_reason for answer in answers] == ["stop", "length", "stop"]
    assert answers[1].token_ids == (11, 12, 13, 14, 15)


def test_looking_at_the_condition_every_few_steps_changes_no_answer(monkeypatch):
    """As on a GPU, whose host waits for every look; the last turn may step on behind the end."""
    asked = [ask(0, 61), ask(10, 5), ask(3, 60, stop=("4",)), ask(0, 1)]
    wanted = session(batch=2).generate(asked)
    monkeypatch.setattr("dspark_jax.decode.loop.steps_a_turn", lambda: 4)
    for chunk in (8, 6):
        assert session(batch=2, chunk_steps=chunk).generate(asked) == wanted


@pytest.mark.parametrize("params", [{}, {"stop": ("END",)}, {"stop_token_ids": (16,)}])
def test_streamed_text_is_the_final_text_in_whole_characters(params):
    pieces = []
    one_step = session(chunk_steps=1)
    (answer,) = one_step.generate([ask(0, 60, **params)], on_text=pieces.append)
    assert "".join(pieces) == answer.text
    assert len(pieces) > 1
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    (silent,) = one_step.generate([ask(0, 60, **params)])
    assert silent == answer


@pytest.mark.usefixtures("listening_to_ctrl_c")
def test_ctrl_c_keeps_what_was_answered():
    slow = session(batch=1, chunk_steps=1)
    done = []

    def interrupt(piece):
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    (answer,) = slow.generate([ask(0, 60)], on_text=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert answer.finish_reason == "abort"
    assert 0 < len(answer.token_ids) < 60
    assert answer.token_ids == tuple(range(1, len(answer.token_ids) + 1))
    assert answer.text == Letters().decode(answer.token_ids)

    def give_up(index, completion):
        done.append(index)
        raise KeyboardInterrupt

    # the slot of the first answer is filled again before that answer is announced
    first, running, refilled, waiting = session(chunk_steps=1).generate(
        [ask(0, 2), ask(0, 60), ask(0, 60), ask(0, 5)], on_completion=give_up
    )
    assert done[0] == 0
    assert first.finish_reason == "length"
    assert running.finish_reason == refilled.finish_reason == "abort"
    assert running.token_ids
    assert (waiting.token_ids, waiting.text, waiting.accepted_length) == ((), "", None)


def test_a_second_ctrl_c_ends_the_call(monkeypatch):
    device_call = SlotPrograms.run

    def struck_after_the_state_is_taken(*arguments, **options):
        device_call(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(SlotPrograms, "run", struck_after_the_state_is_taken)
    with pytest.raises(KeyboardInterrupt):
        session().generate([ask(0, 9), ask(0, 9)])


def test_completions_are_announced_once_each(oracle):
    seen = {}
    answers = oracle.generate(
        [ask(0, n) for n in (9, 2, 5)], on_completion=lambda i, c: seen.setdefault(i, []).append(c)
    )
    assert seen == {index: [answer] for index, answer in enumerate(answers)}


@pytest.mark.parametrize("mode", ["off", "compact"])
def test_nothing_is_traced_after_warm_up(mode):
    buckets = (3, 15) if mode == "compact" else None
    fresh = session(mode=mode, batch=3, max_context=160, buckets=buckets)
    kinds = ({}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "logprobs": 3})
    for kind in kinds:
        fresh.warmup(SamplingParams(**kind))
    for kind in kinds:
        lengths = (1, 20, 70, 140, 33)
        requests = [
            Request([i % VOCAB for i in range(n)], SamplingParams(max_new_tokens=9, **kind))
            for n in lengths
        ]
        with jax.no_tracing():
            answers = fresh.generate([*requests, ask(0, 9, stop=("9",), **kind)])
        assert len(answers) == 6


PRICES = {
    "device": jax.devices()[0].device_kind,
    "model": "toy",
    "dtype": "float32",
    "block_size": BLOCK,
    "contexts": [0],
    "verify": {"tokens": [1, 2, 4, 8, 16], "seconds": [[1.0], [1.1], [1.2], [1.3], [1.4]]},
    "draft": {"requests": [2], "seconds": [[1e-3]]},
    "largest_bucket": 16,
}


def prices(tmp_path, **changes):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**PRICES, **changes}))
    return path


def test_fewer_drafts_are_verified_when_confidence_falls_and_the_answer_stays(tmp_path):
    costs = prices(tmp_path)
    pairs = [drafter(confidence=logit) for logit in (8.0, -4.0)]
    sure, unsure = (
        session(pair, cost_table=costs, buckets=None).generate([ask(0, 40)])[0] for pair in pairs
    )
    assert sure.token_ids == unsure.token_ids
    assert np.mean(unsure.windows[1:]) < 0.5 * np.mean(sure.windows[1:])


def test_costs_measured_for_another_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'other'.*'toy'"):
        session(cost_table=prices(tmp_path, model="other"))


def test_ready_made_costs_must_cover_the_batch():
    with pytest.raises(ValueError, match=r"\(6, 2, 4\).*\(11, 3, 4\)"):
        session(cost_table=no_costs(1, BLOCK))


def test_tables_in_memory_price_the_rows_of_prompts_that_ride_along(oracle):
    rows = jnp.arange(2 * (BLOCK + 1) + 1, dtype=jnp.float32)
    costs = no_costs(2, BLOCK).replace(verify=1 + rows[None], known=jnp.asarray(True))
    pair = target(), drafter()
    found = tables_for(*pair, oracle.config, costs, None, batch=2, prompt_rows=7)
    np.testing.assert_allclose(found.verify, 8 + rows[None])


def test_the_lack_of_costs_is_said_once_and_a_distant_calibration_too(caplog):
    with caplog.at_level(logging.WARNING):
        calibrated = session(calibration=identity(BLOCK))
        for _ in range(3):
            calibrated.generate([ask(0, 2, temperature=1.0)])
        calibrated.generate([ask(0, 2)])
    messages = [record.message for record in caplog.records]
    assert len([m for m in messages if "no cost table" in m]) == 1
    assert len([m for m in messages if "calibration fitted at temperature 0" in m]) == 1


def test_a_calibration_of_another_block_size_is_refused():
    with pytest.raises(ValueError, match=r"5 temperatures.*4"):
        session(calibration=identity(5))


BAD_REQUESTS = [
    (Request([]), "empty prompt"),
    (Request(""), "empty prompt"),
    (Request([0] * CONTEXT), "prompt of 64 tokens; a context of 64 holds at most 63"),
    (Request([0] * 100), "prompt of 100 tokens; a context of 64"),
    (Request([0, VOCAB]), r"token id 64; the target's vocabulary has ids 0\.\.63"),
    (Request([-1]), "token id -1"),
    (Request([0.5]), r"token id 0\.5"),
    (ask(0, stop_token_ids=(99,)), "stop_token_ids holds token id 99"),
    (ask(0, stop_token_ids=tuple(range(17))), "17 stop ids.*at most 16"),
]


@pytest.mark.parametrize(("request_", "message"), BAD_REQUESTS)
def test_a_request_that_cannot_be_answered_is_refused_before_anything_is_compiled(
    oracle, request_, message
):
    with jax.no_tracing(), pytest.raises(ValueError, match=message):
        oracle.generate([ask(0), request_])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0, "buckets": None}, "batch is 0"),
        ({"chunk_steps": 0}, "chunk_steps is 0"),
        ({"max_context": 1}, "max_context is 1"),
        ({"mode": "eager"}, "mode is 'eager'"),
        ({"policy": "greedy"}, "policy is 'greedy'"),
        ({"lag": 0}, "lag is 0"),
        ({"k": 5}, r"k is 5; wanted 1\.\.4"),
        ({"k": 0}, r"k is 0; wanted 1\.\.4"),
        ({"k": 2.5}, r"k is 2\.5; wanted a whole number"),
        ({"batch": 1.5}, r"batch is 1\.5; wanted a whole number"),
        ({"lag": 1.5}, r"lag is 1\.5; wanted a whole number"),
        ({"max_context": 10.5}, r"max_context is 10\.5; wanted a whole number"),
        ({"walk_caps": (3, 1, 4)}, r"walk_caps are \(3, 1, 4\); wanted increasing"),
        ({"walk_caps": (5, 4)}, r"walk_caps are \(5, 4\)"),
        ({"buckets": (2, 8)}, r"end at 10"),
        ({"mode": "compact", "pair": drafter(head=False)}, "no confidence head"),
        ({"mode": "static", "pair": None}, "without a drafter"),
    ],
)
def test_settings_that_do_not_fit_are_refused_naming_both(options, message):
    with pytest.raises(ValueError, match=message):
        session(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "off", "k": 2}, 'k is 2 in mode "off", which drafts nothing'),
        ({"pair": None, "k": 2}, 'k is 2 in mode "off", which drafts nothing'),
        ({"mode": "static", "policy": "causal"}, "policy is 'causal' in mode 'static'"),
        ({"mode": "off", "policy": "fresh"}, "policy is 'fresh' in mode 'off'"),
        ({"mode": "off", "cost_table": "nowhere.json"}, "a cost table is given and mode is 'off'"),
        ({"mode": "static", "cost_table": COSTS}, "a cost table is given and mode is 'static'"),
        ({"pair": None, "calibration": "nowhere.json"}, 'calibration is given and mode is "off"'),
        ({"pair": drafter(head=False), "calibration": identity(BLOCK)}, "has no confidence head"),
        ({"mode": "cap-accept", "buckets": (10,)}, r"buckets are \(10,\) in mode 'cap-accept'"),
        ({"mode": "off", "buckets": (10,)}, r"buckets are \(10,\) in mode 'off'"),
        ({"mode": "static", "walk_caps": (1, 4)}, r"walk_caps are \(1, 4\) in mode 'static'"),
    ],
)
def test_a_setting_that_nothing_would_look_at_is_refused_naming_what_would(options, message):
    with pytest.raises(ValueError, match=f"{message}.*wanted"):
        session(**options)


def test_a_promise_that_holds_without_drafts_as_well_is_no_fault():
    assert session(mode="off", lag=3, allow_biased=True).generate([ask(0, 1)])


def test_a_setting_that_is_not_supported_yet_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="tensor_parallel_size"):
        session(tensor_parallel_size=2)
    with pytest.raises(TypeError, match="speed"):
        session(speed=2)


@pytest.mark.parametrize("k", [1, 3])
def test_any_depth_up_to_the_trained_block_is_lossless(k):
    (answer,) = session(mode="static", k=k).generate([ask(0, 16)])
    assert answer.token_ids == tuple(range(1, 17))
    assert max(answer.windows) == k


def test_the_biased_policy_needs_consent_only_where_it_is_biased():
    short = {"policy": "fresh", "k": 1, "buckets": (4,)}
    unapproved = session(**short)
    assert unapproved.generate([ask(0, 3)])[0].token_ids == (1, 2, 3)
    with pytest.raises(ValueError, match="allow_biased"):
        unapproved.generate([ask(0, 3), ask(0, 3, temperature=0.5)])
    approved = session(allow_biased=True, **short)
    assert len(approved.generate([ask(0, 3, temperature=0.5)])[0].token_ids) == 3


def test_without_a_tokenizer_text_is_refused_and_token_ids_work():
    silent = session(target=target(text=False))
    assert silent.generate([ask(0, 3)])[0].text is None
    for request in (Request("123"), ask(0, 3, stop=("4",))):
        with pytest.raises(ValueError, match="no tokenizer"):
            silent.generate([request])
    with pytest.raises(ValueError, match="on_text needs a tokenizer"):
        silent.generate([ask(0, 3)], on_text=print)


def test_text_prompts_are_encoded_and_streams_follow_one_request(oracle):
    (answer,) = oracle.generate([Request("123", SamplingParams(max_new_tokens=2))])
    assert answer.prompt_ids == (1, 2, 3)
    assert answer.text == "45"
    with pytest.raises(ValueError, match="2 were given"):
        oracle.generate([ask(0), ask(1)], on_text=print)
    assert oracle.generate([]) == []


def test_a_drafter_made_for_another_target_is_refused():
    dense = DenseConfig(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    config = DrafterConfig(
        block_size=BLOCK,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        target_layer_ids=(0, 2),
        target_hidden_size=24,
        num_target_layers=4,
        mask_token_id=63,
        markov_rank=4,
    )
    model = dataclasses.replace(target(), config=dense)
    with pytest.raises(ValueError, match=r"24.*16"):
        Generator(model, LoadedDrafter(config, None, "x"))
    with pytest.raises(ValueError, match=r"max_context is 256.*128"):
        Generator(model, None, max_context=256)
    other = MarkovDrafterConfig(32, BLOCK)
    with pytest.raises(ValueError, match=r"32.*64"):
        session(LoadedDrafter(other, None, "x"))


def test_a_wide_batch_fills_and_reads_slots_in_groups():
    wide = session(None, batch=24)
    requests = [ask(i % 40, 1 + i % 7) for i in range(60)]
    for request, answer in zip(requests, wide.generate(requests), strict=True):
        first = request.prompt[0] + 1
        assert answer.token_ids == tuple(range(first, first + request.params.max_new_tokens))
