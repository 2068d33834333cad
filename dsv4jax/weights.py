"""Weights: how modules declare them, and the types that hold them in memory.

A module attribute is an `nnx.Param` whose value is an `ArraySpec` (a bare tensor) or one of the weight types below with
`ArraySpec` leaves. The path of a leaf in the module tree is the tensor's name in the released checkpoint
(`layers.2.attn.wq_a.scale`); only the expert stacks hold several tensors in one leaf.
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4jax.config import ModelConfig
from dsv4jax.quant import BLOCK, ceil_div, dequantize_blocks, e2m1_decode

STORED_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
}
"""Safetensors type to type in memory. Scales stay raw exponent bytes, packed FP4 pairs are bytes without sign."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape, stored type and logical axes of one weight array.

    `derived` marks an array that is computed at load (the Engram token map) and is not a tensor of the checkpoint.
    `memory` is the type in memory where it differs from the stored one: a BF16 tensor that is computed with in fp32,
    and that some checkpoints store as F32.
    """

    shape: tuple[int, ...]
    stored: str
    axes: tuple[str | None, ...]
    derived: bool = False
    memory: str | None = None

    @property
    def dtype(self) -> np.dtype:
        """Type in memory."""
        return STORED_DTYPES[self.memory or self.stored]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


@flax.struct.dataclass
class DenseWeight:
    """`weight [..., out, in]` in BF16."""

    weight: Any


@flax.struct.dataclass
class Fp8Weight:
    """`weight [..., out, in]` E4M3; `scale [..., ceil(out/rows), ceil(in/cols)]` UE8M0 bytes; block = (rows, cols)."""

    weight: Any
    scale: Any
    block: tuple[int, int] = flax.struct.field(pytree_node=False, default=(BLOCK, BLOCK))


@flax.struct.dataclass
class Mxfp4Weight:
    """`weight [..., out, in/2]` two E2M1 codes per byte, even column low; `scale [..., out, in/32]` UE8M0 bytes."""

    weight: Any
    scale: Any


@flax.struct.dataclass
class RoundedWeight:
    """A quantised weight in training: the values [..., out, in] that its stored form decodes to, with a gradient."""

    weight: Any


Weight = DenseWeight | Fp8Weight | Mxfp4Weight | RoundedWeight


def declare_array(shape: tuple[int, ...], stored: str, axes: tuple[str | None, ...], **kwargs: Any) -> nnx.Param:
    """A bare tensor."""
    return nnx.Param(ArraySpec(shape, stored, axes, **kwargs))


def declare_dense(out: int, inner: int, axes: tuple[str | None, str | None], **kwargs: str) -> nnx.Param:
    """A BF16 linear weight [out, inner]."""
    return nnx.Param(DenseWeight(ArraySpec((out, inner), "BF16", axes, **kwargs)))


def declare_fp8(
    cfg: ModelConfig,
    out: int,
    inner: int,
    axes: tuple[str | None, str | None],
    block: tuple[int, int] = (BLOCK, BLOCK),
) -> nnx.Param:
    """An FP8 linear weight [out, inner]; BF16 when the checkpoint is not quantised."""
    if not cfg.quantized:
        return declare_dense(out, inner, axes)
    scale = (ceil_div(out, block[0]), ceil_div(inner, block[1]))
    return nnx.Param(
        Fp8Weight(ArraySpec((out, inner), "F8_E4M3", axes), ArraySpec(scale, "F8_E8M0", axes), block=block)
    )


def declare_experts(cfg: ModelConfig, experts: int, out: int, inner: int, axes: tuple[str, ...]) -> nnx.Param:
    """The same FP4 linear weight of all experts [experts, out, inner]; BF16 when the checkpoint is not quantised."""
    if not cfg.quantized:
        return nnx.Param(DenseWeight(ArraySpec((experts, out, inner), "BF16", axes)))
    return nnx.Param(
        Mxfp4Weight(
            ArraySpec((experts, out, inner // 2), "I8", axes),
            ArraySpec((experts, out, inner // BLOCK), "F8_E8M0", axes),
        )
    )


def dequantize(weight: Weight | nnx.Param, dtype: DTypeLike) -> Float[Array, "... out inner"]:
    """The values of a weight (section 5.4); exact in bfloat16 for every stored format."""
    weight = unboxed(weight)
    match weight:
        case DenseWeight() | RoundedWeight():
            return weight.weight.astype(dtype)
        case Fp8Weight():
            return dequantize_blocks(weight.weight, weight.scale, weight.block, dtype)
        case Mxfp4Weight():
            elements = e2m1_decode(weight.weight)
            return dequantize_blocks(elements, weight.scale, (1, BLOCK), dtype)
    raise TypeError(f"not a weight: {type(weight)}")


def select_expert(weight: Weight, expert: Array) -> Weight:
    """The weight of one expert out of a stack."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, expert, keepdims=False), weight)


def matmul(
    x: Float[Array, "*rows inner"],
    w: Float[Array, "out inner"],
) -> Float[Array, "*rows out"]:
    """x wᵀ accumulated and returned in fp32; fp32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if jnp.float32 in (x.dtype, w.dtype) else None
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, w, contract, precision=precision, preferred_element_type=jnp.float32)


def unboxed(weight: Weight | nnx.Param) -> Weight:
    """The weight itself, which a module holds in an `nnx.Param`."""
    return weight.get_value() if isinstance(weight, nnx.Param) else weight
