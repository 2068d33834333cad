"""How many drafts of each request to verify: the numbers that promise the most tokens per second.

A draft's survival is the predicted probability that it and all drafts before it are accepted: the running product of
sigmoid(confidence). A step over a batch then emits 1 + the sum of the survivals of its verified drafts per request, on
average, and takes a time that depends on how many tokens it runs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Measured times of a step of one program, from which `choose_draft_counts` decides.

    Raises ValueError on construction unless `tokens` are increasing integers from 1 on and all times are positive.
    """

    tokens: tuple[int, ...]
    """Numbers of verified tokens, over the whole batch, at which the verification was measured."""
    verify_seconds: tuple[float, ...]
    """Time of target model and verification at each of them."""
    draft_seconds: float
    """Time of a draft round, which is the same for any number of verified tokens."""

    def __post_init__(self):
        if not self.tokens or len(self.tokens) != len(self.verify_seconds):
            raise ValueError(
                f"verify_seconds must have one entry for each of tokens, at least one: got {len(self.verify_seconds)}"
                f" for {len(self.tokens)}"
            )
        if self.tokens[0] < 1 or any(a >= b for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError(f"tokens must be increasing integers from 1 on, got {self.tokens}")
        for name, seconds in (("verify_seconds", self.verify_seconds), ("draft_seconds", (self.draft_seconds,))):
            if not all(0 < value < float("inf") for value in seconds):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")

    def table(self) -> Float32[np.ndarray, "totals"]:
        """Seconds of a step that verifies 0, 1, .. tokens[-1] tokens: linear between measurements, level below them."""
        totals = np.arange(self.tokens[-1] + 1)
        return np.float32(np.interp(totals, self.tokens, self.verify_seconds) + self.draft_seconds)


def survivals(confidences: Float[Array, "requests drafts"]) -> Float32[Array, "requests drafts"]:
    """Probability that each draft and all before it are accepted; 0 from the first confidence that is NaN on.

    Args:
      confidences: raw logits of the confidence head (section 7.4).
    """
    product = jnp.cumprod(jax.nn.sigmoid(confidences.astype(jnp.float32)), axis=1)
    return jnp.where(jnp.isnan(product), 0.0, product)


def choose_draft_counts(
    confidences: Float[Array, "requests drafts"],
    limits: Int32[Array, "requests"],
    cost_table: Float32[Array, "totals"],
    minimums: Int32[Array, "requests"] | None = None,
    *,
    drawn_at_random: bool,
) -> Int32[Array, "requests"]:
    """Numbers of drafts to verify that maximise expected tokens over time of the step.

    Args:
      confidences: raw logits of the confidence head; row (b, j) belongs to draft j of request b.
      limits: the most drafts each request may verify; below 0 for a padded request.
      cost_table: seconds of a step by the number of tokens it verifies, requests and drafts together; at least
        requests · (1 + drafts) + 1 entries. Where it falls, the larger time before counts: a step is not taken to be
        cheaper for running more tokens.
      minimums: drafts to verify in any case, at most `limits`: equal to it for a request with a fixed number.
      drawn_at_random: True where `verify` gets draft logits. What comes out then has the target's distribution only if
        a draft has no say in whether it is verified, and the confidences after it depend on it. So each draft is
        decided on as if the request's later drafts were as likely to follow as this one. False gives the maximum over
        all choices.

    Of equally good choices the smallest is taken. Tokens go to the drafts with the largest survivals, equal ones in
    order of request and draft.

    Returns:
      Counts, 0 for a padded request.

    Raises:
      ValueError: the cost table is too short.
    """
    requests, drafts = confidences.shape
    if cost_table.shape[0] < requests * (1 + drafts) + 1:
        raise ValueError(
            f"cost_table has {cost_table.shape[0]} entries: {requests} requests with {drafts} drafts need"
            f" {requests * (1 + drafts) + 1}"
        )
    place = jnp.arange(drafts)
    allowed = (place < limits[:, None]).ravel()
    required = jnp.zeros_like(allowed) if minimums is None else allowed & (place < minimums[:, None]).ravel()
    cost = lax.cummax(cost_table)
    present = jnp.sum(limits >= 0)

    def best(survival: Float32[Array, "all"]) -> Bool[Array, "all"]:
        """Drafts to verify; `survival` has those of all requests in one row."""
        order = jnp.argsort(-jnp.where(required, 2.0, jnp.where(allowed, survival, -1.0)), stable=True)
        tokens = present + jnp.pad(jnp.cumsum(survival[order]), (1, 0))
        chosen = jnp.arange(requests * drafts + 1)
        possible = (chosen >= jnp.sum(required)) & (chosen <= jnp.sum(allowed))
        rate = jnp.where(possible, tokens / cost[present + chosen], -jnp.inf)
        return jnp.zeros_like(allowed).at[order].set(chosen[:-1] < jnp.argmax(rate))

    survival = survivals(confidences)
    if drawn_at_random:
        last = survival / jnp.pad(survival[:, :-1], [(0, 0), (1, 0)], constant_values=1.0)
        last = jnp.where(survival > 0, last, 0.0)  # of a draft, given that those before it are accepted
        ahead = place - place[:, None]
        forecast = survival[:, :, None] * last[:, :, None] ** jnp.maximum(ahead, 0)
        known = jnp.where(ahead <= 0, survival[:, None], forecast)  # [requests, drafts, drafts]

        def decided(request: Int32[Array, ""], draft: Int32[Array, ""]) -> Bool[Array, ""]:
            as_seen = survival.at[request].set(known[request, draft])
            return best(as_seen.ravel())[request * drafts + draft]

        verified = jax.vmap(jax.vmap(decided, (None, 0)), (0, None))(jnp.arange(requests), place)
    else:
        verified = best(survival.ravel()).reshape(requests, drafts)
    return jnp.sum(jnp.cumprod(verified.astype(jnp.int32), axis=1), axis=1)
