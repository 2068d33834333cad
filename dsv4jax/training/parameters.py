"""Trained parameters: fp32 masters, what the model sees of them while it learns, and their stored forms.

Masters are nested as `abstract_params(cfg)`, with one fp32 array of decoded shape per weight in place of a quantised
weight's elements and scales. Whatever the model computes with has been through the stored form, so that training knows
every rounding of the checkpoint; gradients pass the rounding unchanged.
"""

import functools
import json
import math
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from dsv4jax.checkpoint.load import compressed_ids
from dsv4jax.checkpoint.safetensors import write_checkpoint
from dsv4jax.checkpoint.snapshot import stored_tensors
from dsv4jax.config import ModelConfig
from dsv4jax.params import Params, abstract_params, checkpoint_inventory, named_leaves
from dsv4jax.quant import encode_fp8_blocks, encode_mxfp4, straight_through
from dsv4jax.tokenizer import Tokenizer
from dsv4jax.weights import (
    STORED_DTYPES,
    ArraySpec,
    DenseWeight,
    Fp8Weight,
    Mxfp4Weight,
    RoundedWeight,
    dequantize,
)

Masters = dict[str, Any]
_WEIGHTS = (DenseWeight, Fp8Weight, Mxfp4Weight)
_PART_BYTES = 15 << 20


def trained_spec(cfg: ModelConfig) -> dict[str, Any]:
    """`abstract_params(cfg)` without what is derived, a weight or `ArraySpec` in place of every master."""
    spec = abstract_params(cfg)
    del spec["engram_token_map"]
    return spec


def abstract_masters(cfg: ModelConfig) -> Masters:
    """Shapes and types of the masters."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(_shape(spec), jnp.float32), trained_spec(cfg), is_leaf=_is_weight
    )


def init_masters(cfg: ModelConfig, seed: int) -> Masters:
    """Random masters to begin training with; equal on every machine.

    Sublayers begin small against the residual streams, streams begin apart, and mixes between them near the identity.
    """

    def draw(path: Any, spec: Any) -> np.ndarray:
        name = _name(path)
        shape = _shape(spec)
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        mean, std = _initial(name, shape, cfg)
        return np.asarray(mean + std * random.standard_normal(shape, np.float32), np.float32)

    return jax.device_put(jax.tree_util.tree_map_with_path(draw, trained_spec(cfg), is_leaf=_is_weight))


def rounded_params(masters: Masters, cfg: ModelConfig, token_map: Int32[Array, " vocab"]) -> Params:
    """Parameters for `merge`, differentiable with respect to `masters`.

    Their values are bit for bit those of `stored_params(masters, ...)`.
    """

    def rounded(spec: Any, master: Array) -> Any:
        match spec:
            case Fp8Weight() | Mxfp4Weight():
                return RoundedWeight(straight_through(lambda m: dequantize(_stored(spec, m), jnp.float32), master))
            case DenseWeight():
                return DenseWeight(_rounded(spec.weight, master))
        return _rounded(spec, master)

    params = jax.tree.map(rounded, trained_spec(cfg), masters, is_leaf=_is_weight)
    return params | {"engram_token_map": jnp.asarray(token_map)}


def stored_params(masters: Masters, cfg: ModelConfig, token_map: Int32[Array, " vocab"]) -> Params:
    """The parameters as `load_params` will return them."""

    def stored(spec: Any, master: Array) -> Any:
        match spec:
            case Fp8Weight() | Mxfp4Weight():
                return _stored(spec, master)
            case DenseWeight():
                return DenseWeight(_dense(spec.weight, master))
        return _dense(spec, master)

    params = jax.tree.map(stored, trained_spec(cfg), masters, is_leaf=_is_weight)
    return params | {"engram_token_map": jnp.asarray(token_map)}


def export_checkpoint(masters: Masters, cfg: ModelConfig, tokenizer: Tokenizer, output: str | Path) -> None:
    """Writes a checkpoint directory in the released layout and number formats.

    Args:
      tokenizer: read from the `tokenizer.json` that is copied.
      output: must not exist.

    Raises:
      FileExistsError: `output` exists.
      ValueError: the tokenizer does not belong to `cfg`.
    """
    token_map = compressed_ids(tokenizer, cfg)
    params = jax.jit(functools.partial(stored_params, cfg=cfg, token_map=token_map))(masters)
    leaves = ((name, np.asarray(leaf)) for name, leaf in named_leaves(params))
    files = {
        "config.json": (json.dumps(cfg.to_dict(), indent=1) + "\n").encode(),
        "tokenizer.json": Path(tokenizer.source).read_bytes(),
    }
    plan = checkpoint_inventory(cfg)
    write_checkpoint(output, plan, stored_tensors(leaves, cfg), shard_bytes=1 << 30, files=files)


def write_masters(directory: Path, masters: Masters, step: int) -> None:
    """Writes masters rounded to BF16, in files below 16 MB, for machines that pass on little else: `part-N.npz`.

    A run that goes on from them has new moments, and is not the one that was left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, np.ndarray]] = [{"step": np.int64(step)}]
    used = 0
    for name, leaf in named_leaves(masters):
        values = np.asarray(leaf).astype(jnp.bfloat16).reshape(-1).view(np.uint16)
        for start in range(0, values.size, _PART_BYTES // 2):
            piece = values[start : start + _PART_BYTES // 2]
            if used + piece.nbytes > _PART_BYTES:
                parts.append({})
                used = 0
            parts[-1][f"{name}@{start}"] = piece
            used += piece.nbytes
    for number, part in enumerate(parts):
        np.savez(directory / f"part-{number}.npz", **part)


def read_masters(directory: Path, cfg: ModelConfig) -> tuple[Masters, int]:
    """What `write_masters` wrote, and the step.

    Raises:
      ValueError: a part is missing, or the masters are not those of `cfg`.
    """
    pieces: dict[str, dict[int, np.ndarray]] = {}
    for file in directory.glob("part-*.npz"):
        with np.load(file) as part:
            for key in part.files:
                name, _, start = key.partition("@")
                pieces.setdefault(name, {})[int(start or 0)] = part[key]
    step = pieces.pop("step", {0: np.int64(-1)})[0]

    def joined(path: Any, shape: tuple[int, ...]) -> np.ndarray:
        name = _name(path)
        found = [values for _, values in sorted(pieces.pop(name, {}).items())]
        values = np.concatenate(found) if found else np.zeros(0, np.uint16)
        if values.size != math.prod(shape):
            raise ValueError(f"{str(directory)!r}: {name!r} has {values.size} values, expected {math.prod(shape)}")
        return values.view(jnp.bfloat16).reshape(shape).astype(np.float32)

    shapes = jax.tree.map(_shape, trained_spec(cfg), is_leaf=_is_weight)
    masters = jax.tree_util.tree_map_with_path(joined, shapes, is_leaf=lambda x: isinstance(x, tuple))
    if pieces or step < 0:
        raise ValueError(f"{str(directory)!r}: unknown masters {sorted(pieces)[:3]}, step {step}")
    return jax.device_put(masters), int(step)


def _name(path: Any) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path).replace(
        ".experts.", ".experts.*."
    )


def _is_weight(x: Any) -> bool:
    return isinstance(x, (*_WEIGHTS, ArraySpec))


def _shape(spec: Any) -> tuple[int, ...]:
    """Shape of a master."""
    match spec:
        case Mxfp4Weight(weight):
            return (*weight.shape[:-1], 2 * weight.shape[-1])
        case DenseWeight(weight) | Fp8Weight(weight):
            return weight.shape
    return spec.shape


def _dense(spec: ArraySpec, master: Array) -> Array:
    """A master in the type that is stored, then in that of memory."""
    return master.astype(STORED_DTYPES[spec.stored]).astype(spec.dtype)


def _rounded(spec: ArraySpec, master: Array) -> Array:
    """The values of `_dense` in fp32, in which the gradients of rows that many tokens look up are summed."""
    return master.astype(STORED_DTYPES[spec.stored]).astype(jnp.float32)


def _stored(spec: Fp8Weight | Mxfp4Weight, master: Float[Array, "..."]) -> Fp8Weight | Mxfp4Weight:
    if isinstance(spec, Mxfp4Weight):
        return Mxfp4Weight(*encode_mxfp4(master))
    return Fp8Weight(*encode_fp8_blocks(master, spec.block), block=spec.block)


def _initial(name: str, shape: tuple[int, ...], cfg: ModelConfig) -> tuple[Any, float]:
    """Mean and standard deviation of a master at the start."""
    per_input = shape[-1] ** -0.5
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return 1.0, 0.0
    if name.endswith("_base"):
        # Input and output mixes differ between streams; the streams themselves hardly mix.
        n = cfg.hc_mult
        spread = np.linspace(-1.5, 1.5, n, dtype=np.float32)
        return np.concatenate([spread[::-1], spread, 5 * np.eye(n, dtype=np.float32).reshape(-1)]), 0.3
    if name.endswith("_scale"):
        return 0.1, 0.0
    if name.endswith(("attn_sink", "bias", "bias_vl")) or "confidence_head" in name:
        return 0.0, 0.0
    if name.endswith("embed.weight") or name == "embed.weight" or name.startswith("image_"):
        return 0.0, 0.5
    if name.endswith("head.weight"):
        return 0.0, 0.5 * per_input
    if name.endswith("engram.wkv.weight") or ".wo_b." in name or ".w2." in name:
        return 0.0, 0.5 * per_input
    return 0.0, per_input
