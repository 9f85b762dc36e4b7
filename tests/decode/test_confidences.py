"""The recorded confidences of a run are those the drafter gave, step for step."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.request import Request, SamplingParams
from dspark_jax.decode.session import Generator
from dspark_jax.testing import markov
from dspark_jax.testing.markov import MarkovDrafterConfig, MarkovTargetConfig

VOCAB, BLOCK = 6, 3


@dataclasses.dataclass(frozen=True)
class Toy:
    """A pair of tables whose every cell of confidence is another number."""

    target: LoadedTarget
    drafter: LoadedDrafter
    confidence: np.ndarray


@pytest.fixture(scope="module")
def toy():
    random = np.random.default_rng(0)
    confidence = np.float32(random.normal(size=(BLOCK, VOCAB)))
    target = markov.MarkovTargetWeights(jnp.asarray(random.normal(size=(VOCAB, VOCAB))))
    drafter = markov.MarkovDrafterWeights(
        jnp.asarray(2 * random.normal(size=(VOCAB, VOCAB))), jnp.asarray(confidence)
    )
    return Toy(
        LoadedTarget(MarkovTargetConfig(VOCAB), target, None, (5,), "table"),
        LoadedDrafter(MarkovDrafterConfig(VOCAB, BLOCK), drafter, "table-drafter"),
        confidence,
    )


def answers(toy, mode="static", **params):
    session = Generator(
        toy.target, toy.drafter, mode=mode, batch=3, max_context=64, record_confidences=True
    )
    requests = [
        Request([i % 5], SamplingParams(temperature=1.0, seed=i, **params)) for i in range(8)
    ]
    return session.generate(requests)


def test_each_step_records_the_logits_of_its_own_anchor_and_drafts(toy):
    for answer in answers(toy, max_new_tokens=20):
        assert len(answer.confidence_logits) == len(answer.accepted) == len(answer.commits)
        emitted = 0
        tokens = (*answer.prompt_ids, *answer.token_ids)
        for step, accepted in enumerate(answer.accepted):
            # the confidence of position j is a table over the token before it
            for j in range(min(accepted, answer.commits[step]) + 1):
                if j < BLOCK:
                    before = tokens[emitted + j]
                    assert answer.confidence_logits[step][j] == toy.confidence[j, before]
            emitted += answer.commits[step]


def test_a_slot_that_is_used_again_keeps_the_records_of_its_own_request(toy):
    together = answers(toy, max_new_tokens=20)
    session = Generator(
        toy.target, toy.drafter, mode="static", batch=1, max_context=64, record_confidences=True
    )
    for index, answer in enumerate(together):
        params = SamplingParams(temperature=1.0, seed=index, max_new_tokens=20)
        (alone,) = session.generate([Request([index % 5], params)])
        assert alone == answer


def test_recording_changes_no_answer_and_is_off_unless_asked_for(toy):
    plain = Generator(toy.target, toy.drafter, mode="static", batch=3, max_context=64)
    requests = [
        Request([i % 5], SamplingParams(temperature=1.0, seed=i, max_new_tokens=20))
        for i in range(8)
    ]
    for unrecorded, recorded in zip(
        plain.generate(requests), answers(toy, max_new_tokens=20), strict=True
    ):
        assert unrecorded.confidence_logits is None
        assert dataclasses.replace(recorded, confidence_logits=None) == unrecorded


def test_adaptive_modes_record_too(toy):
    assert all(answer.confidence_logits for answer in answers(toy, "compact", max_new_tokens=8))


def test_there_is_nothing_to_record_without_drafts_or_without_a_confidence_head(toy):
    headless = dataclasses.replace(toy.drafter.config, enable_confidence_head=False)
    for drafter, mode in ((None, "off"), (headless, "static")):
        with pytest.raises(ValueError, match=f"record_confidences.*mode is '{mode}'"):
            StepConfig(toy.target.config, drafter, mode, record_confidences=True)
