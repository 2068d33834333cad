"""Where top_k and top_p cut the list of a row's tokens, best first."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.device import hopper_obstacle
from pallas_kernels.sampling_cut import kernel, reference, weights

__all__ = ["sampling_cut"]

_MAX_VOCAB = 2**17
"""So that sums over a row stay below 2^32."""


def sampling_cut(
    logits: Float32[Array, "rows vocab"],
    best: Float32[Array, " rows"],
    random: Bool[Array, " rows"],
    temperature: Float32[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
    *,
    implementation: str,
) -> tuple[Float32[Array, " rows"], Int32[Array, " rows"]]:
    """A logit and an id per row: of the tokens with this logit those up to the id are kept, of the others those above.

    Kept are the top_k best tokens, and of these the shortest list of best ones that holds at least top_p of their
    probability, at least one. Equal logits (also 0 and -0) rank by id, smaller first. Probabilities relative to the
    best token are integers (see `weights`), so that no order of summation can move a cut.

    Rows that are not `random`, that ask for neither, or whose best logit is not finite, keep everything: -inf and the
    size of the vocabulary. The kernel does not read them.

    Args:
      best: the largest logit of each row, NaN where a row holds NaN.
      temperature: positive where `random`.
      top_k: 0 or at least the vocabulary for no limit.
      top_p: 1 for no limit.
      implementation: "reference" or "pallas"; both keep the same tokens, but may describe the place differently.

    Raises:
      ValueError: the vocabulary has more than 2^17 tokens, or the implementation is unknown or cannot run; the message
        says why.
    """
    rows, vocab = logits.shape
    if vocab > _MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab}: must be at most {_MAX_VOCAB}")
    asking = random & jnp.isfinite(best)
    top_k = jnp.where(asking & (top_k < vocab), top_k, 0).astype(jnp.int32)
    top_p = jnp.where(asking, top_p, 1.0)
    scale = weights.scale(jnp.where(asking, temperature, 1.0))
    match implementation:
        case "reference":
            return reference.sampling_cut(logits, best, scale, top_k, top_p)
        case "pallas":
            if why := hopper_obstacle() or kernel.obstacle(rows, vocab):
                raise ValueError(f'implementation = "pallas": {why}')
            return kernel.sampling_cut(logits, best, scale, top_k, top_p)
    raise ValueError(f'implementation = {implementation!r}: must be "reference" or "pallas"')
