"""Linear layers: one function for every form of weight, in plain JAX or with a kernel."""

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4jax.numerics import Numerics
from dsv4jax.quant import qdq_fp8
from dsv4jax.weights import DenseWeight, Fp8Weight, Weight, dequantize, matmul, unboxed
from pallas_kernels.fp8_linear import QuantizedActivations, fp8_linear, quantize_activations
from sharding import SINGLE, Layout
from sharding.exchange import sum_over_devices


@flax.struct.dataclass
class Activations:
    """Input of several linears: its values, and their FP8 form where a kernel has made it."""

    values: Float[Array, "rows inner"]
    quantized: QuantizedActivations | None = None

    def take(self, rows: Int[Array, " taken"]) -> "Activations":
        """Some of the rows."""
        return Activations(self.values[rows], self.quantized and self.quantized.take(rows))


def linear(
    x: Float[Array, "*rows inner"] | Activations,
    weight: Weight | nnx.Param,
    numerics: Numerics,
    devices: Layout = SINGLE,
) -> Float[Array, "*rows out"]:
    """y = x Wᵀ with fp32 accumulation and one rounding to the type of x (section 5.4).

    The input of a quantised weight is first quantised to FP8 per 32 channels.

    Args:
      devices: where those that work on one request hold parts of the inner dimension, their sum is taken.
    """
    weight = unboxed(weight)
    x, quantized = (x.values, x.quantized) if isinstance(x, Activations) else (x, None)
    if numerics.implementation == "pallas" and isinstance(weight, Fp8Weight):
        rows = quantized or quantize_activations(x.reshape(-1, x.shape[-1]))
        return sum_over_devices(devices, fp8_linear(rows, weight)).reshape(*x.shape[:-1], -1)
    if numerics.quantize_activations and not isinstance(weight, DenseWeight):
        x = qdq_fp8(x)
    return sum_over_devices(devices, matmul(x, dequantize(weight, x.dtype))).astype(x.dtype)


def linear_fp32(x: Float[Array, "*rows inner"], weight: Weight | nnx.Param | Array) -> Float[Array, "*rows out"]:
    """y = x Wᵀ as a true fp32 matmul (router, ratio-2 compressor, heads)."""
    values = weight if isinstance(weight, jax.Array) else dequantize(weight, jnp.float32)
    return matmul(x.astype(jnp.float32), values.astype(jnp.float32))
