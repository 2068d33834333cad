"""Trained parameters: fp32 masters, what the model sees of them while it learns, and their stored forms.

Masters are nested as `abstract_params(cfg)`, with one fp32 array of decoded shape per weight in place of a quantised
weight's elements and scales. Whatever the model computes with has been through the stored form, so that training knows
every rounding of the checkpoint; gradients pass the rounding unchanged.
"""

import json
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


def trained_spec(cfg: ModelConfig) -> dict[str, Any]:
    """`abstract_params(cfg)` without what is derived, a weight or `ArraySpec` in place of every master."""
    spec = abstract_params(cfg)
    del spec["engram_token_map"]
    return spec


def init_masters(cfg: ModelConfig, seed: int) -> Masters:
    """Random masters to begin training with; equal on every machine.

    Sublayers begin small against the residual streams, streams begin apart, and mixes between them near the identity.
    """

    def draw(path: Any, spec: Any) -> jax.Array:
        name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        shape = _shape(spec)
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        mean, std = _initial(name, shape, cfg)
        return jnp.asarray(mean + std * random.standard_normal(shape, np.float32), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, trained_spec(cfg), is_leaf=_is_weight)


def rounded_params(masters: Masters, cfg: ModelConfig, token_map: Int32[Array, " vocab"]) -> Params:
    """Parameters for `merge`, differentiable with respect to `masters`.

    Their values are bit for bit those of `stored_params(masters, ...)`.
    """

    def rounded(spec: Any, master: Array) -> Any:
        match spec:
            case Fp8Weight() | Mxfp4Weight():
                return RoundedWeight(straight_through(lambda m: dequantize(_stored(spec, m), jnp.float32), master))
            case DenseWeight():
                return DenseWeight(_dense(spec.weight, master))
        return _dense(spec, master)

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
    params = stored_params(masters, cfg, compressed_ids(tokenizer, cfg))
    leaves = ((name, np.asarray(leaf)) for name, leaf in named_leaves(params))
    files = {
        "config.json": (json.dumps(cfg.to_dict(), indent=1) + "\n").encode(),
        "tokenizer.json": Path(tokenizer.source).read_bytes(),
    }
    plan = checkpoint_inventory(cfg)
    write_checkpoint(output, plan, stored_tensors(leaves, cfg), shard_bytes=1 << 30, files=files)


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
