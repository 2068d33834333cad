"""The parameters of a checkpoint in the form that the programs of an engine take."""

from pathlib import Path

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
    """Loads a checkpoint, experts into their first slots, and packs it for the kernels if the shape says so.

    Raises: as `load_params`, `pack_params` and `initial_owners`.
    """
    stacks = {"placement": "layers", "draft_placement": "mtp"}
    owners = {
        stacks[name]: initial_owners(layers, experts, layout.ranks, slots)
        for name, (layers, experts, slots) in moving_experts(cfg, **shape.slots_of_experts).items()
    }
    options = {"tables_on_device": shape.tables_on_device, "owners": owners, "progress": progress}
    params = load_params(path, cfg, layout, **options)
    return pack_params(params, layout) if shape.numerics.implementation == "pallas" else params
