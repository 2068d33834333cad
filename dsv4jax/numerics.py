"""How a run computes: where it rounds, the switches the tests need, and whether kernels run."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Static choice of arithmetic, an argument of every forward pass.

    `REFERENCE` rounds exactly where the architecture page (section 2.4) puts a rounding. `FAST` skips the roundings
    that section 11 lists as free: index scores stay fp32 (6), the pooled latent is normalised unrounded (4), the
    routing weight multiplies after the down projection (5). Kernels do round the pooled latent.
    """

    dtype: type = jnp.bfloat16
    """Type of streams and sublayer values; float32 only to compare with float32 golden data."""
    quantize_activations: bool = True
    """Quantise the input of FP8 and FP4 linears to FP8 per 32 channels (section 5.4)."""
    quantize_cache: bool = True
    """Quantise window keys, compressed entries, index keys and index queries. False is for tests only."""
    fast: bool = False
    implementation: str = "reference"
    """Which form of the operations in `pallas_kernels` runs: "reference" is plain JAX, "pallas" the GPU kernels."""
    routing: str = "model"
    """Experiment only: "uniform" or "skewed" make tokens take experts by chance, see `dsv4jax.model.forced_routing`."""


REFERENCE = Numerics()
FAST = Numerics(fast=True)
