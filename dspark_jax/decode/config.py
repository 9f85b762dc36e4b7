"""Everything about a decode step that is fixed at compile time."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

Mode = Literal["off", "static", "compact", "cap-accept"]
Policy = Literal["lagged", "causal", "fresh"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What every step of a dispatch drafts and verifies, decided before it begins.

    Attributes:
        depth: drafts walked of each request; 0 drafts nothing.
        rows: rows verified over the whole batch: every anchor, and the drafts of highest survival
            as far as there is room for them.
    """

    depth: int
    rows: int


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Static argument of ``decode_step``; hashable.

    Attributes:
        target: target config (``models.protocol.TargetFamily`` behind ``.family``).
        drafter: drafter config, or None for a target alone (mode "off").
        mode: what is verified and what is committed (docs/verification.md).
        k: drafts walked and verified per block; None means the drafter's block size.
        policy: which confidences decide the budget (docs/budget.md).
        threshold: None, or 0..1: instead of a budget, a window ends before the first draft whose
            calibrated confidence, given all before it, is not above this. Exact: what is verified
            at a position depends on the drafts before it alone.
        lag: age in steps of the confidences that policy "lagged" decides by; at least 1.
        smoothing: weight of a request's newest confidences against those of its earlier blocks, in
            what policy "lagged" decides by; 1 takes the newest alone.
        hysteresis: relative gain in expected throughput below which a batch that drafts goes on
            and one that does not stays without.
        buckets: ascending token counts of the compact verify batch. The last one holds
            every slot's full window. Empty means that one bucket.
        shape: what is drafted and verified, in place of a budget; the caller decides it by policy
            "lagged", from steps before the dispatch, which is exact. Modes "compact" and
            "cap-accept".
        walk_caps: ascending draft depths the sequential head may stop at; the last is the
            full depth. Empty means that one. 0 is always possible (a step without drafts).
        sampled: False promises that every request is greedy; no noise is then drawn.
        filtered: False promises that no request uses top-k or top-p.
        logprobs: None, or how many alternatives to report beside each token's logprob.
        record_confidences: keep every step's uncalibrated confidence logits, to fit STS on.
        bound_blocks: bound what full blocks would have committed (``verify.block_accept``).
    """

    target: Any
    drafter: Any
    mode: Mode
    k: int | None = None
    policy: Policy = "lagged"
    threshold: float | None = None
    lag: int = 1
    smoothing: float = 0.5
    hysteresis: float = 0.02
    buckets: tuple[int, ...] = ()
    shape: Shape | None = None
    walk_caps: tuple[int, ...] = ()
    sampled: bool = True
    filtered: bool = True
    logprobs: int | None = None
    record_confidences: bool = False
    bound_blocks: bool = False

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is {self.mode!r}; wanted one of {', '.join(get_args(Mode))}")
        if self.policy not in get_args(Policy):
            raise ValueError(
                f"policy is {self.policy!r}; wanted one of {', '.join(get_args(Policy))}"
            )
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; wanted a probability, 0..1, or None")
        if self.threshold is not None and not self.adaptive:
            raise ValueError(
                f'threshold is {self.threshold} in mode {self.mode!r}; wanted mode "compact" or '
                '"cap-accept", whose windows it decides'
            )
        if self.shape is not None and (
            not self.adaptive or (self.policy, self.threshold) != ("lagged", None)
        ):
            raise ValueError(
                f"shape is {self.shape} with mode {self.mode!r}, policy {self.policy!r} and "
                f'threshold {self.threshold}; wanted mode "compact" or "cap-accept", policy '
                '"lagged" and no threshold: only there it is known before the drafts'
            )
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing is {self.smoothing}; wanted a weight, above 0 and up to 1")
        if not 0 <= self.hysteresis < 1:
            raise ValueError(f"hysteresis is {self.hysteresis}; wanted a share, 0 or more, below 1")
        if self.lag < 1:
            raise ValueError(f"lag is {self.lag}; wanted at least 1 step")
        if self.record_confidences and not (self.drafts and self.drafter.enable_confidence_head):
            raise ValueError(
                "record_confidences needs a drafter with a confidence head and a mode that drafts; "
                f"the mode is {self.mode!r}"
            )
        if self.bound_blocks and not (self.adaptive and self.drafts):
            raise ValueError(
                f'bound_blocks is on in mode {self.mode!r}; wanted "compact" or "cap-accept": '
                "elsewhere no block is cut"
            )
        self._refuse_idle()
        if self.mode == "off":
            return
        if self.drafter is None:
            raise ValueError(f'mode is {self.mode!r} without a drafter; wanted mode "off"')
        if self.k is not None and not 1 <= self.k <= self.drafter.block_size:
            raise ValueError(
                f"k is {self.k}; wanted 1..{self.drafter.block_size}, the block size the drafter "
                "was trained for"
            )
        limit = getattr(self.target, "verify_rows", None)
        if limit is not None and self.width > limit:
            raise ValueError(
                f"windows are {self.width} rows, the anchor and {self.depth} drafts, but this "
                f"target takes back at most {limit}; wanted k of at most {limit - 1}"
            )
        if self.adaptive and not self.drafter.enable_confidence_head:
            raise ValueError(
                f"mode is {self.mode!r} and the drafter has no confidence head; wanted a drafter "
                'with one, or mode "static"'
            )
        if self.walk_caps and self.walk_caps[-1] != self.depth:
            raise ValueError(f"walk_caps end at {self.walk_caps[-1]}; wanted {self.depth}")
        if self.shape is not None and not 0 <= self.shape.depth <= self.depth:
            raise ValueError(f"depth of the shape is {self.shape.depth}; wanted 0..{self.depth}")

    def _refuse_idle(self) -> None:
        """Refuse what is asked for and cannot happen in this mode.

        What only promises something, such as ``lag``, holds where nothing is decided as well.
        """
        if self.k is not None and self.mode == "off":
            raise ValueError(
                f'k is {self.k} in mode "off", which drafts nothing; wanted a drafter and a mode '
                "that drafts, or no k"
            )
        if self.policy == "lagged" or (self.adaptive and self.threshold is None):
            return
        place = f"in mode {self.mode!r}"
        if self.threshold is not None:
            place = f"with threshold {self.threshold}"
        raise ValueError(
            f"policy is {self.policy!r} {place}, where no budget is decided; wanted mode "
            '"compact" or "cap-accept" and no threshold, or no policy'
        )

    @property
    def drafts(self) -> bool:
        """Whether steps draft at all."""
        return self.mode != "off" and self.drafter is not None

    @property
    def reads_logits(self) -> bool:
        """Whether steps read more of the target's logits than the best token of each row."""
        return self.sampled or self.logprobs is not None

    @property
    def adaptive(self) -> bool:
        """Whether windows are chosen from confidences and costs."""
        return self.mode in ("compact", "cap-accept")

    @property
    def depth(self) -> int:
        """Drafts per block, G in the shapes of this package (0 in mode "off")."""
        if self.mode == "off":
            return 0
        return self.drafter.block_size if self.k is None else self.k

    @property
    def width(self) -> int:
        """Rows of a full window, W = G + 1: the anchor and its drafts."""
        return self.depth + 1

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the drafter reads; none in mode "off"."""
        return () if self.mode == "off" else self.drafter.target_layer_ids
