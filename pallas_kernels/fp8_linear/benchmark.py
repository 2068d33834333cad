"""Benchmark cases of the FP8 linears at the rows of decode steps, beside XLA's lowering of the reference."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.quant import BLOCK
from dsv4jax.weights import Fp8Weight
from pallas_kernels.fp8_linear import fp8_grouped_linear, fp8_linear, quantize_activations
from pallas_kernels.fp8_linear.arg_specs import ARG_SPECS, GROUPS, ROWS, ArgSpec
from pallas_kernels.timing import Case

READ_RATE = 4.3e12
"""Bytes per second of an H200, for goals in microseconds."""
SHARE = 0.75
"""Of the read rate: the goal."""
COLD = 150e6
"""Bytes of the weights that a case takes in turn: more than the L2 cache holds."""


def cases() -> list[Case]:
    """Every product of `ARG_SPECS` with the kernel, and with the reference at 16 rows."""
    kernel = [_case(name, rows, "pallas") for name in ARG_SPECS for rows in ROWS]
    return [*kernel, *(_case(name, 16, "reference") for name in ARG_SPECS)]


def _case(name: str, rows: int, implementation: str) -> Case:
    spec = ARG_SPECS[name]
    size = fewest_bytes(spec, rows)

    def run(x, weight):
        product = fp8_grouped_linear if spec.grouped else fp8_linear
        return product(x, weight, implementation=implementation)

    def make():
        sets = math.ceil(COLD / (spec.out * spec.inner))
        x = _activations(spec, rows)
        return jax.jit(run), [(x, _weight(spec, seed)) for seed in range(sets)]

    kernel = implementation == "pallas"
    return Case(
        name=f"fp8 linear {name} {rows} rows{'' if kernel else ', XLA'}",
        make=make,
        bytes=size,
        flops=2.0 * rows * spec.out * spec.inner,
        flops_type="bf16" if spec.grouped else "fp8",
        goal=size / READ_RATE / SHARE * 1e6 if kernel else None,
    )


def fewest_bytes(spec: ArgSpec, rows: int) -> float:
    """Weight, input, their scales and the result, each moved once."""
    weight = spec.out * spec.inner * (1 + 1 / BLOCK**2)
    x = 2 * spec.inner * GROUPS if spec.grouped else spec.inner * (1 + 4 / BLOCK)
    return weight + rows * (x + 2 * spec.out)


def _activations(spec: ArgSpec, rows: int):
    shape = (rows, GROUPS, spec.inner) if spec.grouped else (rows, spec.inner)
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    return x if spec.grouped else jax.jit(quantize_activations)(x)


def _weight(spec: ArgSpec, seed: int) -> Fp8Weight:
    """Any finite elements, with scales around those of the released model."""
    elements, scale = jax.random.split(jax.random.key(seed))
    bits = jax.random.bits(elements, (spec.out, spec.inner), jnp.uint8)
    bits = jnp.where((bits & 127) == 127, jnp.uint8(0x38), bits)
    scale = 116 + jax.random.bits(scale, (spec.out // BLOCK, spec.inner // BLOCK), jnp.uint8) % 8
    return Fp8Weight(lax.bitcast_convert_type(bits, jnp.float8_e4m3fn), scale)
