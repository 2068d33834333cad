"""Counts of drafted and accepted tokens, and how well the confidence head predicted them; on device."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from dsv4jax.draft_counts import survivals

BINS = 10


@flax.struct.dataclass
class DraftStatistics:
    """Sums over steps; `jax.tree.map(jnp.add, a, b)` adds two.

    Counts are 32-bit: whoever reads them has to start again from `zero_statistics` before 2^31 drafts.
    """

    rounds: Int32[Array, ""]
    """Verifications of a request with at least one draft: the acceptance length is 1 + sum(accepted) / rounds."""
    verified: Int32[Array, "drafts"]
    """Drafts that were verified, by place."""
    accepted: Int32[Array, "drafts"]
    """Of these, accepted."""
    predicted: Float32[Array, "bins"]
    """Reliability table: sum of the survivals of verified drafts with a survival from i / BINS to (i + 1) / BINS."""
    bin_verified: Int32[Array, "bins"]
    """How many drafts these were."""
    bin_accepted: Int32[Array, "bins"]
    """Of these, accepted: over `bin_verified` it should be near `predicted` over `bin_verified`."""


def zero_statistics(drafts: int) -> DraftStatistics:
    """Statistics of no step, for up to `drafts` drafts per request."""
    return DraftStatistics(
        rounds=jnp.zeros((), jnp.int32),
        verified=jnp.zeros(drafts, jnp.int32),
        accepted=jnp.zeros(drafts, jnp.int32),
        predicted=jnp.zeros(BINS, jnp.float32),
        bin_verified=jnp.zeros(BINS, jnp.int32),
        bin_accepted=jnp.zeros(BINS, jnp.int32),
    )


def step_statistics(
    confidences: Float[Array, "requests drafts"],
    draft_counts: Int32[Array, "requests"],
    accepted: Int32[Array, "requests"],
    valid: Bool[Array, "requests"],
) -> DraftStatistics:
    """Statistics of one step.

    Args:
      confidences: raw logits of the confidence head for the verified drafts.
      draft_counts, accepted: how many drafts of each request were verified and accepted, as `verify` takes and
        returns them. After `forced_acceptance` they say nothing about the model.
      valid: False for a padded request.
    """
    place = jnp.arange(confidences.shape[1])
    verified = (place < draft_counts[:, None]) & valid[:, None]
    stands = verified & (place < accepted[:, None])
    survival = survivals(confidences)
    bins = jnp.where(verified, jnp.minimum((survival * BINS).astype(jnp.int32), BINS - 1), BINS)

    def by_bin(values: Array) -> Array:
        return jnp.zeros(BINS, values.dtype).at[bins].add(values, mode="drop")

    return DraftStatistics(
        rounds=jnp.sum(jnp.any(verified, axis=1), dtype=jnp.int32),
        verified=jnp.sum(verified, axis=0, dtype=jnp.int32),
        accepted=jnp.sum(stands, axis=0, dtype=jnp.int32),
        predicted=by_bin(survival),
        bin_verified=by_bin(verified.astype(jnp.int32)),
        bin_accepted=by_bin(stands.astype(jnp.int32)),
    )
