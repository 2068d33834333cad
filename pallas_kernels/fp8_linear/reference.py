"""FP8 linear in plain JAX: the CPU path, and what the kernel is tested against."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax, nn
from jaxtyping import Array, Float, Int

from dsv4jax.model.rope import Rotation, rotate
from dsv4jax.quant import BLOCK, e8m0_decode, pack_fp8
from dsv4jax.weights import Fp8Weight, dequantize


@flax.struct.dataclass
class QuantizedActivations:
    """Rows in FP8 with one power-of-two scale per 32 channels (architecture section 5.3).

    The scales are fp32 and channel-group major, as the kernel reads them: one step of channels is one block of memory.
    """

    elements: Float[Array, "rows inner"]
    scale: Float[Array, "groups rows"]

    def take(self, rows: Int[Array, " taken"]) -> "QuantizedActivations":
        """Some of the rows."""
        return QuantizedActivations(self.elements[rows], self.scale[:, rows])


def quantize_activations(x: Float[Array, "rows inner"]) -> QuantizedActivations:
    """FP8 elements and scales of x, whose width is a multiple of 32."""
    record = pack_fp8(x)
    n = x.shape[-1]
    elements = lax.bitcast_convert_type(record[..., :n], jnp.float8_e4m3fn)
    return QuantizedActivations(elements, e8m0_decode(record[..., n:]).T)


def swiglu_activations(gate_up: Float[Array, "rows twice"], limit: float) -> QuantizedActivations:
    """See `pallas_kernels.fp8_linear`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, 1)
    z = nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    return quantize_activations(z.astype(gate_up.dtype))


def dequantize_activations(x: QuantizedActivations) -> Float[Array, "rows inner"]:
    """The values in bfloat16, exact."""
    rows, inner = x.elements.shape
    groups = x.elements.astype(jnp.float32).reshape(rows, inner // BLOCK, BLOCK)
    return (groups * x.scale.T[..., None]).reshape(rows, inner).astype(jnp.bfloat16)


def fp8_linear(
    x: QuantizedActivations, weights: Sequence[Fp8Weight], by: Rotation | None = None, heads: int = 1
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.fp8_linear`."""
    values = dequantize_activations(x)
    # The sums are fp32, but asked for as such they would pass through memory before they are rounded.
    contract = (((1,), (1,)), ((), ()))
    parts = [
        lax.dot_general(values, dequantize(weight, jnp.bfloat16), contract, preferred_element_type=jnp.bfloat16)
        for weight in weights
    ]
    y = parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1)
    if by is None:
        return y
    return rotate(y.reshape(y.shape[0], heads, -1), jax.tree.map(lambda a: a[:, None], by)).reshape(y.shape)


def fp8_grouped_linear(x: Float[Array, "rows groups inner"], weight: Fp8Weight) -> Float[Array, "rows out"]:
    """See `pallas_kernels.fp8_linear`."""
    rows, groups, inner = x.shape
    w = dequantize(weight, x.dtype).reshape(groups, -1, inner)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum("tgi,goi->tgo", x, w, precision=precision, preferred_element_type=x.dtype)
    return y.reshape(rows, weight.weight.shape[0])
