"""FP8 linear layers: activations quantised to FP8 per 32 channels, and the grouped one with bfloat16 activations."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4jax.quant import BLOCK
from dsv4jax.weights import Fp8Weight
from pallas_kernels.device import hopper_obstacle
from pallas_kernels.fp8_linear import kernel, reference
from pallas_kernels.fp8_linear.plans import MAX_KERNEL_ROWS, choose_plan
from pallas_kernels.fp8_linear.reference import QuantizedActivations, dequantize_activations, quantize_activations

__all__ = [
    "MAX_GROUPED_SCALE",
    "QuantizedActivations",
    "dequantize_activations",
    "fp8_grouped_linear",
    "fp8_linear",
    "quantize_activations",
]

MAX_GROUPED_SCALE = 134
"""Largest scale byte, 2^7, of a weight that the kernel of `fp8_grouped_linear` multiplies rightly."""


def fp8_linear(
    x: QuantizedActivations, weight: Fp8Weight, *, implementation: str | None = None
) -> Float[Array, "rows out"]:
    """x Wᵀ in bfloat16 with fp32 accumulation (architecture section 5.4).

    Args:
      x: rows in E4M3 with scales that are powers of two.
      weight: [out, in] as stored, with one UE8M0 scale per 32 x 32.
      implementation: "reference" (plain JAX), "pallas" (Hopper GPUs; in a multiple of 128, out of 64), or None for
        what is best on the device: the kernel up to `MAX_KERNEL_ROWS` rows, beyond which dequantising pays.

    The kernel reads the weight once for every 96 rows and is fastest where rows are a multiple of 4. Products of 32
    channels are summed by the FP8 tensor cores, which keep fewer bits than fp32 (relative error of the result about
    1e-4 before rounding), and these sums in fp32 in a fixed order: the same result on every run. A NaN in a row of x or
    in the weight gives unspecified values in its row or column. No rows give an empty array.

    Raises:
      ValueError: x and the weight do not fit, or `implementation` is unknown or cannot run; the message says why.
    """
    rows, inner = x.elements.shape
    if inner != weight.weight.shape[-1]:
        raise ValueError(f"x has {inner} channels, the weight {weight.weight.shape[-1]}")
    if x.scale.shape != (inner // BLOCK, rows):
        raise ValueError(f"the scales of x are {list(x.scale.shape)}: must be [{inner // BLOCK}, {rows}]")
    if _use_kernel(x.elements, jnp.float8_e4m3fn, weight, 1, implementation):
        plan = choose_plan(rows, *weight.weight.shape)
        return kernel.fp8_matmul(x.elements, x.scale, weight.weight, weight.scale, plan)
    return reference.fp8_linear(x, weight)


def fp8_grouped_linear(
    x: Float[Array, "rows groups inner"], weight: Fp8Weight, *, implementation: str | None = None
) -> Float[Array, "rows out"]:
    """The products of each group of x with its own part of the rows of an FP8 weight (section 3.7: `wo_a`).

    Args:
      x: bfloat16, not quantised. The reference also takes other types, which the result then has.
      weight: [out, inner]; group g has rows g·out/groups .. (g+1)·out/groups, and so the result its columns.
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
    if _use_kernel(x, jnp.bfloat16, weight, groups, implementation):
        plan = choose_plan(rows, out, inner, grouped=True)
        return kernel.fp8_matmul(x.reshape(rows, -1), None, weight.weight, weight.scale, plan)
    return reference.fp8_grouped_linear(x, weight)


def _use_kernel(x: Array, dtype: DTypeLike, weight: Fp8Weight, groups: int, implementation: str | None) -> bool:
    """Whether the kernel, which takes x of `dtype`, computes the product."""
    if implementation not in (None, "reference", "pallas"):
        raise ValueError(f'implementation = {implementation!r}: must be "reference", "pallas" or None')
    rows = x.shape[0]
    if implementation == "reference" or (implementation is None and rows > MAX_KERNEL_ROWS):
        return False
    obstacle = _obstacle(x, dtype, weight, groups)
    if obstacle and implementation == "pallas":
        raise ValueError(f'implementation = "pallas": {obstacle}')
    return not obstacle and rows > 0


def _obstacle(x: Array, dtype: DTypeLike, weight: Fp8Weight, groups: int) -> str | None:
    """Why the kernel cannot run, or None."""
    if weight.weight.ndim != 2 or weight.block != (BLOCK, BLOCK):
        shape = list(weight.weight.shape)
        return f"the weight is {shape} in blocks of {weight.block}: must be [out, in] in blocks of {(BLOCK, BLOCK)}"
    if x.dtype != dtype:
        return f"x is {x.dtype}: must be {jnp.dtype(dtype)}"
    out, inner = weight.weight.shape
    rows = max(x.shape[0], 1)
    plan = choose_plan(rows, out, inner, grouped=dtype == jnp.bfloat16)
    return kernel.obstacle(rows, groups, out, inner, plan) or hopper_obstacle()
