"""Meshes, sharding rules, and what devices exchange. Nothing outside this package names a mesh axis."""

from sharding.layout import (
    PRESETS,
    SINGLE,
    Layout,
    decode_dep,
    emulated_rank,
    latency,
    prefill_dep,
    preset,
    single,
)
from sharding.placement import ExpertPlacement
from sharding.rules import (
    ShardingRules,
    abstract_mesh,
    expert_parallel,
    make_mesh,
    padded_shape,
    sharding_for,
    tensor_parallel,
    tracing_for,
)

__all__ = [
    "PRESETS",
    "SINGLE",
    "ExpertPlacement",
    "Layout",
    "ShardingRules",
    "abstract_mesh",
    "decode_dep",
    "emulated_rank",
    "expert_parallel",
    "latency",
    "make_mesh",
    "padded_shape",
    "prefill_dep",
    "preset",
    "sharding_for",
    "single",
    "tensor_parallel",
    "tracing_for",
]
