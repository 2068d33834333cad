"""The parameters of a checkpoint in the form that the programs of an engine take."""

from pathlib import Path

from dsv4jax.balance.balancer import spread_params
from dsv4jax.checkpoint.load import load_params
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_shape import EngineShape
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
    if shape.expert_slots is None:
        return params
    return spread_params(
        params, initial_owners(cfg.num_hidden_layers, cfg.n_routed_experts, layout.ranks, shape.expert_slots)
    )
