"""Rejection sampling along the draft chain, on packed verify rows."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.models.ragged import Packed
from dspark_jax.verify.filters import filter_logits
from pallas_kernels.best_linear import best_token


@flax.struct.dataclass
class Sampling:
    """Target distribution of each request: temperature (0 = greedy), top-k, top-p."""

    temperature: Float[Array, "S"]
    top_k: Int[Array, "S"]
    top_p: Float[Array, "S"]

    @property
    def greedy(self) -> Bool[Array, "S"]:
        """Requests that take the most likely token."""
        return self.temperature == 0


def target_scores(
    logits: Float[Array, "T V"], sampling: Sampling, *, filtered: bool
) -> Float[Array, "T V"]:
    """fp32 logits over temperature, -inf outside top-k and top-p: p = softmax of this.

    Greedy rows are scored at temperature 1; their scores are not used.
    """
    temperature = jnp.where(sampling.greedy, 1.0, sampling.temperature)
    scores = logits / temperature[:, None]
    if filtered:
        scores = filter_logits(scores, sampling.top_k, sampling.top_p)
    return scores


def accepted_prefix(
    logits: Float[Array, "T V"] | None,
    best: Int[Array, "T"],
    packed: Packed,
    drafts: Int[Array, "S G"],
    draft_logprob: Float[Array, "S G"] | None,
    uniforms: Float[Array, "S G"] | None,
    sampling: Sampling,
    verified: Int[Array, "S"],
    *,
    filtered: bool,
) -> Int[Array, "S"]:
    """Drafts accepted before the first rejection, among the ``verified`` ones of each request.

    Draft x_j is judged by the row before it: accepted when u q(x_j) < p(x_j), that is with
    probability min(1, p/q) (Leviathan et al., arXiv 2211.17192); a greedy request accepts the
    most likely token, ``best``, only. ``draft_logprob`` and ``uniforms`` are None when every
    request is greedy, and ``logits`` may be.
    """
    requests, depth = drafts.shape
    owner = jnp.minimum(packed.request, requests - 1)
    column = jnp.minimum(packed.within(), depth - 1)
    judged = drafts[owner, column]
    accept = judged == best
    if draft_logprob is not None:
        assert uniforms is not None
        assert logits is not None
        own = jax.tree.map(lambda field: field[owner], sampling)
        scores = target_scores(logits, own, filtered=filtered)
        chosen = jnp.take_along_axis(scores, judged[:, None], axis=-1)[:, 0]
        logprob = chosen - jax.nn.logsumexp(scores, axis=-1)
        ratio = jnp.exp(logprob - draft_logprob[owner, column])
        accept = jnp.where(own.greedy, accept, uniforms[owner, column] < ratio)
    accept = packed.unpack(accept, fill=False)[:, :depth]
    position = jnp.arange(1, depth + 1)[None]
    accept &= position <= verified[:, None]
    return jnp.cumprod(accept.astype(jnp.int32), axis=1).sum(axis=1)


def final_token(
    logits: Float[Array, "S V"],
    best: Int[Array, "S"],
    draft_scores: Float[Array, "S Vd"] | None,
    draft_to_target: Int[Array, "Vd"] | None,
    rejected: Bool[Array, "S"],
    gumbel: Float[Array, "S V"],
    sampling: Sampling,
    *,
    filtered: bool,
) -> Int[Array, "S"]:
    """The token that ends a block: from norm(max(p - q, 0)) after a rejection, else from p.

    ``logits`` is the target row at the first position not accepted and ``best`` its most likely
    token, which ends the blocks of greedy requests; ``draft_scores`` is what the draft rejected
    there was drawn from (None when nothing was drafted).
    """
    scores = target_scores(logits, sampling, filtered=filtered)
    if draft_scores is not None:
        draft_probability = jax.nn.softmax(draft_scores, axis=-1)
        if draft_to_target is not None:
            wide = jnp.zeros(logits.shape, jnp.float32)
            draft_probability = wide.at[:, draft_to_target].set(draft_probability)
        residual = jnp.maximum(jax.nn.softmax(scores, axis=-1) - draft_probability, 0.0)
        # p == q to the last bit leaves no residual; a rejection is then a rounding event
        usable = rejected & (residual.sum(axis=-1) > 0)
        scores = jnp.where(usable[:, None], jnp.log(residual), scores)
    drawn = best_token(scores + gumbel)
    return jnp.where(sampling.greedy, best, drawn)
