"""The parameters of a checkpoint in the form that the programs of an engine take."""

from pathlib import Path

from dsv4jax.balance.balancer import spread_params
from dsv4jax.checkpoint.load import load_params
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_shape import EngineShape
from dsv4jax.engine.programs import moving_experts
from dsv4jax.packing import pack_params
from dsv4jax.params import Params
from sharding import Layout
from sharding.placement import initial_owners


def load_engine_params(
    path: str | Path, cfg: ModelConfig, shape: EngineShape, layout: Layout, progress: bool = True
) -> Params:
    """Loads a checkpoint, packs it for the kernels if the shape says so, and spreads experts over their first slots.

    Raises: as `load_params`, `pack_params` and `initial_owners`.
    """
    params = load_params(path, cfg, layout, tables_on_device=shape.tables_on_device, progress=progress)
    if shape.numerics.implementation == "pallas":
        params = pack_params(params, layout)
    stacks = {"placement": "layers", "draft_placement": "mtp"}
    for name, (layers, experts, slots) in moving_experts(cfg, **shape.slots_of_experts).items():
        params = spread_params(params, initial_owners(layers, experts, layout.ranks, slots), stacks[name])
    return params
