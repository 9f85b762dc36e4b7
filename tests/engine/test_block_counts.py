"""What is counted of blocks, from how often each kind occurred."""

import numpy as np

from dspark_jax.engine.block_counts import BlockCounts


def test_sums_over_blocks_are_those_of_one_block_after_the_other():
    random = np.random.default_rng(0)
    width, shape = 5, (3, 40)
    window, judged = (random.integers(0, width, shape) for _ in range(2))
    commits = np.minimum(judged, window) + 1
    commits -= random.integers(0, 2, shape) * (commits > 1)  # an accepted stop ends some
    live = random.uniform(size=shape) < 0.8
    counts = BlockCounts(width)
    for _ in range(2):
        counts.add(live, commits, window, judged)
    wanted = dict.fromkeys(counts.totals(), 0)
    verified, reached, accepted = np.zeros((3, width - 1), int)
    for count, drafts, got in zip(commits[live], window[live], judged[live], strict=True):
        committed = min(got, drafts)
        stopped = count <= committed
        proposed = count if stopped else drafts
        wanted["verifications"] += 2
        wanted["tokens"] += 2 * count
        wanted["windows"] += 2 * drafts
        wanted["proposed"] += 2 * proposed
        wanted["accepted"] += 2 * min(count, committed)
        wanted["trimmed"] += 0 if stopped else 2 * max(got - drafts, 0)
        for position in range(1, width):
            verified[position - 1] += 2 * (proposed >= position)
            reached[position - 1] += 2 * (
                position <= proposed and position <= min(count, committed) + 1
            )
            accepted[position - 1] += 2 * (min(count, committed) >= position)
    assert counts.totals() == wanted
    assert counts.windows().tolist() == (2 * np.bincount(window[live], minlength=6)).tolist()
    found = counts.by_position()
    assert found["verified"].tolist() == verified.tolist()
    assert found["reached"].tolist() == reached.tolist()
    assert found["accepted"].tolist() == accepted.tolist()
