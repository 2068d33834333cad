"""Linear layers: one function for every form of weight, in plain JAX or with a kernel."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4jax.model.rope import Rotation, rotate
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
    *,
    by: Rotation | None = None,
    heads: int = 1,
) -> Float[Array, "*rows out"]:
    """y = x Wᵀ with fp32 accumulation and one rounding to the type of x (section 5.4).

    The input of a quantised weight is first quantised to FP8 per 32 channels.

    Args:
      devices: where those that work on one request hold parts of the inner dimension, their sum is taken.
      by: rotation of each row, applied to the last channels of each of `heads` equal parts of y (section 3.3). The
        inner dimension is whole then.
    """
    weight = unboxed(weight)
    x, quantized = (x.values, x.quantized) if isinstance(x, Activations) else (x, None)
    if numerics.implementation == "pallas" and isinstance(weight, Fp8Weight):
        rows = quantized or quantize_activations(x.reshape(-1, x.shape[-1]))
        y = fp8_linear(rows, weight, by=by, heads=heads)
        return sum_over_devices(devices, y).reshape(*x.shape[:-1], -1)
    if numerics.quantize_activations and not isinstance(weight, DenseWeight):
        x = qdq_fp8(x)
    y = sum_over_devices(devices, matmul(x, dequantize(weight, x.dtype))).astype(x.dtype)
    if by is None:
        return y
    parts = y.reshape(*y.shape[:-1], heads, -1)
    return rotate(parts, jax.tree.map(lambda a: a[..., None, :], by)).reshape(y.shape)


def joint_linear(x: Activations, weights: Sequence[Weight | nnx.Param], numerics: Numerics) -> Float[Array, "rows out"]:
    """`linear` of several weights with the same input, the results side by side."""
    weights = [unboxed(weight) for weight in weights]
    if numerics.implementation == "pallas" and all(isinstance(weight, Fp8Weight) for weight in weights):
        return fp8_linear(x.quantized or quantize_activations(x.values), *weights)
    return jnp.concatenate([linear(x, weight, numerics) for weight in weights], -1)


def linear_fp32(x: Float[Array, "*rows inner"], weight: Weight | nnx.Param | Array) -> Float[Array, "*rows out"]:
    """y = x Wᵀ as a true fp32 matmul (router, ratio-2 compressor, heads)."""
    values = weight if isinstance(weight, jax.Array) else unboxed(weight)
    if isinstance(values, DenseWeight):
        values = values.weight
    elif not isinstance(values, jax.Array):
        values = dequantize(values, jnp.bfloat16)  # Which holds every quantised format exactly.
    if x.dtype == values.dtype == jnp.bfloat16:
        # Their products are exact in fp32: tensor cores need one pass, not several as for fp32 operands.
        return matmul(x, values)
    return matmul(x.astype(jnp.float32), values.astype(jnp.float32))
