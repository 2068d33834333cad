"""FP8 linear layers: activations quantised to FP8 per 32 channels, and the grouped one with bfloat16 activations."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4jax.model.rope import Rotation
from dsv4jax.quant import BLOCK
from dsv4jax.weights import Fp8Weight
from pallas_kernels.device import hopper_obstacle
from pallas_kernels.fp8_linear import kernel, reference, swiglu
from pallas_kernels.fp8_linear.plans import MAX_KERNEL_ROWS, choose_plan
from pallas_kernels.fp8_linear.reference import QuantizedActivations, dequantize_activations, quantize_activations

__all__ = [
    "MAX_GROUPED_SCALE",
    "QuantizedActivations",
    "dequantize_activations",
    "fp8_grouped_linear",
    "fp8_linear",
    "quantize_activations",
    "swiglu_activations",
]

MAX_GROUPED_SCALE = 134
"""Largest scale byte, 2^7, of a weight that the kernel of `fp8_grouped_linear` multiplies rightly."""


def fp8_linear(
    x: QuantizedActivations,
    *weights: Fp8Weight,
    by: Rotation | None = None,
    heads: int = 1,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """x Wᵀ in bfloat16 with fp32 accumulation (architecture section 5.4), for one weight or several side by side.

    Args:
      x: rows in E4M3 with scales that are powers of two.
      weights: [out, in] as stored, with one UE8M0 scale per 32 x 32; the result of the first comes first.
      by: rotation of each row, applied to the last channels of each of `heads` equal parts of the rounded result
        (3.3); None for none.
      implementation: "reference" (plain JAX), "pallas" (Hopper GPUs; in a multiple of 128, out of 64), or None for
        what is best on the device: the kernel up to `MAX_KERNEL_ROWS` rows, beyond which dequantising pays.

    The kernel reads the weight once for every 96 rows and is fastest where rows are a multiple of 4. Products of 32
    channels are summed by the FP8 tensor cores, which keep fewer bits than fp32 (relative error of the result about
    1e-4 before rounding), and these sums in fp32 in a fixed order: the same result on every run. A NaN in a row of x or
    in the weight gives unspecified values in its row or column. No rows give an empty array.

    Raises:
      ValueError: x, the weights and the rotation do not fit, or `implementation` is unknown or cannot run; the message
        says why.
    """
    rows, inner = x.elements.shape
    for weight in weights:
        if inner != weight.weight.shape[-1]:
            raise ValueError(f"x has {inner} channels, the weight {weight.weight.shape[-1]}")
    out = sum(weight.weight.shape[0] for weight in weights)
    if out % heads:
        raise ValueError(f"heads = {heads}: must divide the {out} channels of the result")
    if x.scale.shape != (inner // BLOCK, rows):
        raise ValueError(f"the scales of x are {list(x.scale.shape)}: must be [{inner // BLOCK}, {rows}]")
    if _use_kernel(x.elements, jnp.float8_e4m3fn, weights, 1, implementation, out // heads, by):
        return kernel.fp8_matmul(x.elements, x.scale, weights, choose_plan(rows, out, inner), by, heads)
    return reference.fp8_linear(x, weights, by, heads)


def fp8_grouped_linear(
    x: Float[Array, "rows groups inner"],
    weight: Fp8Weight,
    *,
    quantize: bool = False,
    implementation: str | None = None,
) -> Float[Array, "rows out"] | QuantizedActivations:
    """The products of each group of x with its own part of the rows of an FP8 weight (section 3.7: `wo_a`).

    Args:
      x: bfloat16, not quantised. The reference also takes other types, which the result then has.
      weight: [out, inner]; group g has rows g·out/groups .. (g+1)·out/groups, and so the result its columns.
      quantize: the result is rounded as it would be otherwise and then quantised, as the next linear takes it.
      implementation: as in `fp8_linear`; the kernel takes scale bytes up to `MAX_GROUPED_SCALE`; larger ones, which
        `pack_params` refuses, give wrong values.

    Sums, NaN and empty input as in `fp8_linear`, but on bfloat16 tensor cores.

    Raises:
      ValueError: x and the weight do not fit, or `implementation` is unknown or cannot run; the message says why.
    """
    rows, groups, inner = x.shape
    out = weight.weight.shape[0]
    if inner != weight.weight.shape[-1]:
        raise ValueError(f"x has {inner} channels in a group, the weight {weight.weight.shape[-1]}")
    if out % groups:
        raise ValueError(f"the weight has {out} rows: must be a multiple of the {groups} groups of x")
    if _use_kernel(x, jnp.bfloat16, (weight,), groups, implementation):
        plan = choose_plan(rows, out, inner, grouped=True)
        return kernel.fp8_matmul(x.reshape(rows, -1), None, (weight,), plan, quantize=quantize)
    y = reference.fp8_grouped_linear(x, weight)
    return quantize_activations(y) if quantize else y


def swiglu_activations(
    gate_up: Float[Array, "rows twice"], limit: float, *, implementation: str | None = None
) -> QuantizedActivations:
    """silu(min(gate, limit)) · clamp(up, ±limit) in fp32, rounded and quantised for the next linear (section 5.2).

    Args:
      gate_up: gate and up projection, side by side.
      implementation: "reference" (plain JAX), "pallas" (Hopper GPUs; bfloat16, rows of a multiple of 32 channels up to
        8192), or None for what the device supports.

    The kernel's sigmoid is exact to a few last bits of fp32. No rows give empty arrays.

    Raises:
      ValueError: `implementation` is unknown or cannot run; the message says why.
    """
    if implementation not in (None, "reference", "pallas"):
        raise ValueError(f'implementation = {implementation!r}: must be "reference", "pallas" or None')
    if implementation != "reference":
        obstacle = swiglu.obstacle(gate_up) or hopper_obstacle()
        if obstacle and implementation == "pallas":
            raise ValueError(f'implementation = "pallas": {obstacle}')
        if not obstacle and gate_up.shape[0]:
            return swiglu.swiglu_activations(gate_up, limit)
    return reference.swiglu_activations(gate_up, limit)


def _use_kernel(
    x: Array,
    dtype: DTypeLike,
    weights: Sequence[Fp8Weight],
    groups: int,
    implementation: str | None,
    head: int = 0,
    by: Rotation | None = None,
) -> bool:
    """Whether the kernel, which takes x of `dtype`, computes the product."""
    if implementation not in (None, "reference", "pallas"):
        raise ValueError(f'implementation = {implementation!r}: must be "reference", "pallas" or None')
    rows = x.shape[0]
    if implementation == "reference" or (implementation is None and rows > MAX_KERNEL_ROWS):
        return False
    obstacle = _obstacle(x, dtype, weights, groups) or _turn_obstacle(head, by) or hopper_obstacle()
    if obstacle and implementation == "pallas":
        raise ValueError(f'implementation = "pallas": {obstacle}')
    return not obstacle and rows > 0


def _obstacle(x: Array, dtype: DTypeLike, weights: Sequence[Fp8Weight], groups: int) -> str | None:
    """Why the kernel cannot compute the product, or None."""
    for weight in weights:
        if weight.weight.ndim != 2 or weight.block != (BLOCK, BLOCK):
            shape = list(weight.weight.shape)
            return f"the weight is {shape} in blocks of {weight.block}: must be [out, in] in blocks of {(BLOCK, BLOCK)}"
    if x.dtype != dtype:
        return f"x is {x.dtype}: must be {jnp.dtype(dtype)}"
    outs, inner = tuple(weight.weight.shape[0] for weight in weights), weights[0].weight.shape[1]
    rows = max(x.shape[0], 1)
    plan = choose_plan(rows, sum(outs), inner, grouped=dtype == jnp.bfloat16)
    return kernel.obstacle(rows, groups, outs, inner, plan)


def _turn_obstacle(head: int, by: Rotation | None) -> str | None:
    """Why the kernel cannot rotate vectors of `head` channels, or None."""
    if by is None:
        return None
    first = head - 2 * by.cos.shape[1]
    if head % 4 or first % 4 or first < 0:
        return f"{by.cos.shape[1]} pairs of {head} channels are rotated: must be an even number within a multiple of 4"
    return None
