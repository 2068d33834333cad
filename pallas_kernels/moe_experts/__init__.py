"""Routed experts: gather, gate/up, SwiGLU, routing weight, down, combine."""

from pallas_kernels.moe_experts.reference import moe_experts

__all__ = ["moe_experts"]
