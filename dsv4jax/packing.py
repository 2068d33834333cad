"""Parameters in the form that the GPU kernels read."""

from typing import Any

import jax

from dsv4jax.params import Params
from dsv4jax.weights import Mxfp4Weight
from pallas_kernels.hyper_connections import split_fp32
from pallas_kernels.moe_experts import pack_experts


def pack_params(params: Params) -> Params:
    """Repacks expert stacks and splits hyper-connection projections, for `Numerics(implementation="pallas")`.

    Nothing is lost. The layers given are consumed one after the other, so that the device holds at most one layer's
    experts twice: the expert stacks of `params` must not be used again.

    Raises:
      ValueError: the experts are not FP4.
    """
    packed = dict(params)
    for stack in ("layers", "mtp"):
        packed[stack] = {}
        for i, layer in params[stack].items():
            packed[stack][i] = jax.block_until_ready(pack_layer(layer))
            for array in jax.tree.leaves(layer["ffn"]["experts"]):
                array.delete()
    return packed


def pack_layer(layer: dict[str, Any]) -> dict[str, Any]:
    """One layer or draft stage of `pack_params`; pure.

    Raises:
      ValueError: the experts are not FP4.
    """
    experts = layer["ffn"]["experts"]
    stacks = [experts[name] for name in ("w1", "w3", "w2")]
    if not all(isinstance(stack, Mxfp4Weight) for stack in stacks):
        raise ValueError(f"experts are {type(stacks[0]).__name__}: the kernels take Mxfp4Weight")
    sites = {f"{site}_fn": jax.jit(split_fp32)(layer[f"{site}_fn"]) for site in ("hc_attn", "hc_ffn")}
    packed = {"packed": jax.jit(pack_experts)(*stacks)}
    return {**layer, **sites, "ffn": {**layer["ffn"], "experts": packed}}
