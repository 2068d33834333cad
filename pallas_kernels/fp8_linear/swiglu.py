"""SwiGLU between two FP8 linears on Hopper: one thread block per row."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16

from dsv4jax.quant import BLOCK
from pallas_kernels import rows
from pallas_kernels.fp8_linear.reference import QuantizedActivations
from pallas_kernels.rows import CHANNELS

MAX_CHANNELS = 1024 * CHANNELS


def obstacle(gate_up: Array) -> str | None:
    """Why the kernel cannot run, or None."""
    width = gate_up.shape[1] // 2
    if gate_up.dtype != jnp.bfloat16:
        return f"gate_up is {gate_up.dtype}: must be bfloat16"
    if width % BLOCK or not 0 < width <= MAX_CHANNELS:
        return f"gate and up have {width} channels: must be a multiple of {BLOCK} up to {MAX_CHANNELS}"
    return None


@functools.partial(jax.jit, static_argnames="limit")
def swiglu_activations(gate_up: BFloat16[Array, "rows twice"], limit: float) -> QuantizedActivations:
    """See `pallas_kernels.fp8_linear`."""
    number, twice = gate_up.shape
    width = twice // 2
    out_type = [
        jax.ShapeDtypeStruct((number, width), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((width // BLOCK, number), jnp.float32),
    ]
    code = functools.partial(device_code, width=width, number=number, limit=limit)
    (elements, scale), _ = rows.each_row(code, number, [gate_up], out_type, width)
    return QuantizedActivations(elements, scale)


def device_code(m, row, gate_up, _, elements, scales, __, *, width: int, number: int, limit: float):
    """The code of a thread block; `m` is a `rows.Machine`."""
    threads = width // CHANNELS
    gate, up = (rows.read(m, m.row(gate_up, row * 2 + part, width // 2), m.tid, threads) for part in range(2))
    z = rows.swiglu(m, gate, up, limit)
    rows.put_activations(m, m.row(elements, row, width // 4), scales, m.tid, threads, row, number, z)
