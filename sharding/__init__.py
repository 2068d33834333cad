"""Meshes and sharding rules. Nothing outside this package names a mesh axis."""

from sharding.rules import EXPERT_PARALLEL, ShardingRules, expert_parallel, make_mesh, sharding_for, single

__all__ = ["EXPERT_PARALLEL", "ShardingRules", "expert_parallel", "make_mesh", "sharding_for", "single"]
