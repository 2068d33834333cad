"""Parameters in the form that the GPU kernels read."""

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding

from dsv4jax.config import ModelConfig
from dsv4jax.numerics import Numerics
from dsv4jax.params import Params, abstract_params, in_memory, leaf_shardings, named_leaves, with_expert_slots
from dsv4jax.weights import Mxfp4Weight
from pallas_kernels.fp8_linear import MAX_GROUPED_SCALE
from pallas_kernels.hyper_connections import split_fp32
from pallas_kernels.moe_experts import PackedExperts, pack_experts
from sharding import SINGLE, Layout

_STACKS = ("layers", "mtp")


def pack_params(params: Params, layout: Layout = SINGLE) -> Params:
    """Repacks expert stacks and splits hyper-connection projections, for `Numerics(implementation="pallas")`.

    Nothing is lost. Over the devices of a layout each packs its own experts. The layers given are consumed one after
    the other, so that a device holds at most one layer's experts twice: the expert stacks of `params` must not be used
    again.

    Raises:
      ValueError: the experts are not FP4, or a scale of `wo_a` is beyond what its kernel takes; names the tensor.
        Nothing has been consumed then.
    """
    for stack in _STACKS:
        for i, layer in params[stack].items():
            _check_layer(f"{stack}.{i}", layer)
    packed = dict(params)
    for stack in _STACKS:
        packed[stack] = {}
        for i, layer in params[stack].items():
            packed[stack][i] = jax.block_until_ready(pack_layer(layer, layout))
            for array in jax.tree.leaves(layer["ffn"]["experts"]):
                array.delete()
    return packed


def pack_layer(layer: dict[str, Any], layout: Layout = SINGLE) -> dict[str, Any]:
    """One layer or draft stage of `pack_params`, without its checks; pure."""
    experts = layer["ffn"]["experts"]
    sites = {f"{site}_fn": _split_fp32(layer[f"{site}_fn"]) for site in ("hc_attn", "hc_ffn")}
    packed = {"packed": _pack_experts(layout, experts["w1"], experts["w3"], experts["w2"])}
    return {**layer, **sites, "ffn": {**layer["ffn"], "experts": packed}}


_split_fp32 = jax.jit(split_fp32)


@functools.partial(jax.jit, static_argnames="layout")
def _pack_experts(layout: Layout, *stacks: Mxfp4Weight) -> PackedExperts:
    return layout.map_spread(pack_experts, *stacks)


def _check_layer(name: str, layer: dict[str, Any]) -> None:
    first = layer["ffn"]["experts"]["w1"]
    if not isinstance(first, Mxfp4Weight):
        raise ValueError(f"{name}.ffn.experts: {type(first).__name__}, the kernels take Mxfp4Weight")
    largest = int(layer["attn"]["wo_a"].scale.max())
    if largest > MAX_GROUPED_SCALE:
        raise ValueError(
            f"{name}.attn.wo_a.scale: holds the byte {largest}, a scale of 2^{largest - 127}; the kernel takes at most"
            f" {MAX_GROUPED_SCALE}"
        )


def param_shapes(
    cfg: ModelConfig,
    numerics: Numerics,
    layout: Layout = SINGLE,
    *,
    tables_on_device: bool = True,
    expert_slots: int | None = None,
    draft_expert_slots: int | None = None,
) -> Params:
    """Shape, type and, over several devices, sharding of the parameters that the steps take: as `load_params` returns
    them, or `pack_params` of these for `numerics.implementation` "pallas".

    Args:
      expert_slots, draft_expert_slots: of each device, for the experts of a backbone layer and of a draft stage; None
        for as many as the experts need.

    Raises:
      ValueError: "pallas", and the experts are not FP4 or have sizes that cannot be packed.
    """
    given = zip(_STACKS, (expert_slots, draft_expert_slots), strict=True)
    slots = {stack: layout.devices * count for stack, count in given if count is not None}
    abstract = in_memory(with_expert_slots(abstract_params(cfg, tables_on_device), slots), layout)
    shardings = {} if layout.mesh is None else leaf_shardings(abstract, layout)
    leaves = [
        jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=shardings.get(name))
        for name, spec in named_leaves(abstract)
    ]
    shapes = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    if numerics.implementation != "pallas":
        return shapes
    if not cfg.quantized:
        raise ValueError("quantized = False: the kernels take FP4 experts")
    pack = functools.partial(pack_layer, layout=layout)
    packed = {stack: {i: jax.eval_shape(pack, layer) for i, layer in shapes[stack].items()} for stack in _STACKS}
    if layout.mesh is not None:
        # Shapes know the mesh without its devices.
        packed = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(layout.mesh, a.sharding.spec)),
            packed,
        )
    return {**shapes, **packed}


@functools.lru_cache
def packing_bytes(
    cfg: ModelConfig,
    layout: Layout = SINGLE,
    expert_slots: int | None = None,
    draft_expert_slots: int | None = None,
) -> int:
    """The most memory of a device that `pack_params` takes at a time beside the parameters it was given.

    Args:
      expert_slots, draft_expert_slots: as in `param_shapes`.
    """
    slots = {"expert_slots": expert_slots, "draft_expert_slots": draft_expert_slots}
    shapes, most = param_shapes(cfg, Numerics(), layout, **slots), 0
    for stack in _STACKS:
        layer = shapes[stack][0]["ffn"]["experts"]
        analysis = _pack_experts.lower(layout, layer["w1"], layer["w3"], layer["w2"]).compile().memory_analysis()
        most = max(most, analysis.temp_size_in_bytes + analysis.output_size_in_bytes)
    return most
