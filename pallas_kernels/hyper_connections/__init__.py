"""Hyper-connection site between two sublayers, fused with the norm and the quantisation of what follows."""

from dsv4jax.config import ModelConfig
from dsv4jax.model.hyper_connections import Residual
from pallas_kernels.device import hopper_obstacle, multiprocessors
from pallas_kernels.hyper_connections import kernel, reference
from pallas_kernels.hyper_connections.kernel import CHANNELS
from pallas_kernels.hyper_connections.mix import STREAMS
from pallas_kernels.hyper_connections.reference import Site, SiteWeights, join_fp32, split_fp32

__all__ = ["Site", "SiteWeights", "hyper_connection_site", "join_fp32", "split_fp32"]


def hyper_connection_site(
    residual: Residual, weights: SiteWeights, cfg: ModelConfig, *, implementation: str | None = None
) -> Site:
    """Enters a sublayer (architecture sections 2.1 to 2.3): settled streams, its input, the same in FP8, the new mix.

    The streams get the last sublayer's output, with the mix carried by `residual`; the input is their collapse with the
    carried `pre`, normalised; the mix predicted from the streams goes on to the next site.

    Args:
      residual: streams [tokens, streams, hidden] and output [tokens, hidden], mix in fp32.
      weights: of this site, with the norm of its sublayer.
      implementation: "reference" (plain JAX), "pallas" (Hopper GPUs; bfloat16, four streams, hidden a multiple of 1024
        up to 7168), or None for what the device supports.

    Values are rounded to the type of the streams where the reference does: streams, collapsed and normalised input. The
    kernel's fp32 sums have their own fixed order: a token's result is the same on every run and whatever other tokens
    there are, and differs from the reference by an occasional last bit. A token with NaN or infinity gives unspecified
    values in its own row only.

    Raises:
      ValueError: there are no tokens, `fn` was not split, or `implementation` is unknown or cannot run; the message
        says why.
    """
    if implementation not in (None, "reference", "pallas"):
        raise ValueError(f'implementation = {implementation!r}: must be "reference", "pallas" or None')
    tokens, streams, hidden = residual.streams.shape
    if not tokens:
        raise ValueError("there are no tokens: a site takes at least one")
    wanted = (3 * streams * (2 + streams), streams * hidden)
    if weights.fn.shape != wanted:
        raise ValueError(f"fn is {list(weights.fn.shape)}: must be {list(wanted)}, as `split_fp32` makes it")
    if implementation != "reference":
        obstacle = _obstacle(residual, weights)
        if obstacle and implementation == "pallas":
            raise ValueError(f'implementation = "pallas": {obstacle}')
        if not obstacle:
            return kernel.hyper_connection_site(residual, weights, cfg)
    return reference.hyper_connection_site(residual, weights, cfg)


def _obstacle(residual: Residual, weights: SiteWeights) -> str | None:
    """Why the kernel cannot run, or None."""
    _, streams, hidden = residual.streams.shape
    types = {str(a.dtype) for a in (residual.streams, residual.output, weights.norm)}
    if types != {"bfloat16"}:
        return f"streams, output and norm are {', '.join(sorted(types))}: must be bfloat16"
    if streams != STREAMS or hidden % CHANNELS or not CHANNELS <= hidden <= kernel.MAX_HIDDEN:
        wanted = f"{STREAMS} streams of a multiple of {CHANNELS} channels up to {kernel.MAX_HIDDEN}"
        return f"there are {streams} streams of {hidden} channels: must be {wanted}"
    if obstacle := hopper_obstacle():
        return obstacle
    number, least = multiprocessors(), kernel.least_multiprocessors(hidden)
    if number < least:
        return f"the device has {number} multiprocessors: must be {least} or more"
    return None
