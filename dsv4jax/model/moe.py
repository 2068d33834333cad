"""Mixture of experts: router, routed experts and the shared expert (architecture sections 5.1, 5.2)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax, nn
from jaxtyping import Array, Bool, Float, Int, Int32

from dsv4jax.config import ModelConfig
from dsv4jax.linear import Activations, joint_linear, linear, linear_fp32
from dsv4jax.model.forced_routing import forced_scores
from dsv4jax.numerics import Numerics
from dsv4jax.weights import declare_array, declare_experts, declare_fp8
from pallas_kernels.fp8_linear import dequantize_activations, swiglu_activations
from pallas_kernels.moe_experts import moe_experts
from pallas_kernels.moe_experts.reference import expert_outputs, sum_of_experts, swiglu
from pallas_kernels.router_select import router_select
from pallas_kernels.router_select.reference import routing_weights
from sharding import SINGLE, Layout
from sharding.exchange import rank_of, routed_experts
from sharding.placement import chosen_slots


class Router(nnx.Module):
    """`ffn.gate`: scores, and the biases that only decide which experts are picked."""

    def __init__(self, experts: int, cfg: ModelConfig):
        self.weight = declare_array((experts, cfg.hidden_size), "BF16", (None, "embed"))
        self.bias = declare_array((experts,), "F32", (None,))
        self.bias_vl = declare_array((experts,), "F32", (None,))

    @jax.named_scope("router")
    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        image_mask: Bool[Array, " tokens"],
        k: int,
        scale: float,
        routing: str = "model",
        implementation: str = "reference",
    ) -> tuple[Int[Array, "tokens k"], Float[Array, "tokens k"]]:
        """Expert ids, best first with ties to the smaller id, and routing weights from the unbiased scores."""
        scores = sqrt_softplus(linear_fp32(x, self.weight[...]))
        if routing != "model":
            _, experts = lax.top_k(forced_scores(scores, routing), k)
            return experts, routing_weights(scores, experts, scale)
        biases = self.bias[...], self.bias_vl[...]
        return router_select(scores, *biases, image_mask, k, scale, implementation=implementation)


class Experts(nnx.Module):
    """`ffn.experts`: stacks of the routed experts' weights, or what `pack_experts` made of them."""

    def __init__(self, experts: int, cfg: ModelConfig, packed: bool):
        self.is_packed = packed
        if packed:
            self.packed = nnx.Param(None)
            return
        width, hidden = cfg.moe_intermediate_size, cfg.hidden_size
        self.w1 = declare_experts(cfg, experts, width, hidden, ("expert", "expert_width", "embed"))
        self.w2 = declare_experts(cfg, experts, hidden, width, ("expert", "embed", "expert_width"))
        self.w3 = declare_experts(cfg, experts, width, hidden, ("expert", "expert_width", "embed"))


class SharedExpert(nnx.Module):
    """`ffn.shared_experts`: one expert that every token takes with weight 1, under the same clamp."""

    def __init__(self, cfg: ModelConfig):
        self.limit = cfg.swiglu_limit
        self.w1 = declare_fp8(cfg, cfg.moe_intermediate_size, cfg.hidden_size, ("shared_width", "embed"))
        self.w2 = declare_fp8(cfg, cfg.hidden_size, cfg.moe_intermediate_size, ("embed", "shared_width"))
        self.w3 = declare_fp8(cfg, cfg.moe_intermediate_size, cfg.hidden_size, ("shared_width", "embed"))

    @jax.named_scope("shared_expert")
    def __call__(self, x: Activations, numerics: Numerics, devices: Layout = SINGLE) -> Float[Array, "tokens hidden"]:
        if numerics.implementation == "pallas":
            gate_up = joint_linear(x, (self.w1, self.w3), numerics)
            z = swiglu_activations(gate_up, self.limit, implementation="pallas")
            return linear(Activations(dequantize_activations(z), z), self.w2, numerics, devices)
        z = swiglu(linear(x, self.w1, numerics), linear(x, self.w3, numerics), self.limit)
        return linear(z.astype(x.values.dtype), self.w2, numerics, devices)


class MoE(nnx.Module):
    """`ffn`: routed plus shared expert."""

    def __init__(self, cfg: ModelConfig, experts: int, experts_per_token: int, packed: bool):
        self.k = experts_per_token
        self.scale = cfg.routed_scaling_factor
        self.limit = cfg.swiglu_limit
        self.gate = Router(experts, cfg)
        self.experts = Experts(experts, cfg, packed)
        self.shared_experts = SharedExpert(cfg)

    @jax.named_scope("experts")
    def __call__(
        self,
        x: Activations,
        valid: Bool[Array, " tokens"],
        image_mask: Bool[Array, " tokens"],
        numerics: Numerics,
        devices: Layout = SINGLE,
        placement: tuple[Array, Array] | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Int[Array, "tokens k"]]:
        """Output, and the experts of each token, the number of experts for tokens that are not valid."""
        values = x.values
        experts, weights = self.gate(values, image_mask, self.k, self.scale, numerics.routing, numerics.implementation)
        chosen = jnp.where(valid[:, None], experts, self.gate.bias[...].shape[0])
        routed = self._routed(values, experts, weights, valid, numerics, devices, placement)
        shared = self.shared_experts(x, numerics, devices).astype(jnp.float32)
        return (routed + shared).astype(values.dtype), chosen

    def _routed(
        self,
        x: Float[Array, "tokens hidden"],
        experts: Int[Array, "tokens k"],
        weights: Float[Array, "tokens k"],
        valid: Bool[Array, " tokens"],
        numerics: Numerics,
        devices: Layout,
        placement: tuple[Array, Array] | None,
    ) -> Float[Array, "tokens hidden"]:
        """Sum over the routed experts, wherever they are.

        Between devices the plain form without `fast` exchanges each expert's contribution, so that they are summed in
        the order of one device and no placement changes a bit; the others exchange one sum per device.
        """
        names = ("packed",) if self.experts.is_packed else ("w1", "w3", "w2")
        stacks = [getattr(self.experts, name).get_value() for name in names]
        one_by_one = devices.devices > 1 and numerics.implementation == "reference" and not numerics.fast
        if one_by_one:
            ascending = jnp.argsort(experts, -1)
            experts, weights = (jnp.take_along_axis(a, ascending, -1) for a in (experts, weights))
        if placement is not None:
            experts = chosen_slots(*placement, experts, jnp.arange(x.shape[0]) + rank_of(devices))

        def apply(x: Array, experts: Array, weights: Array, valid: Array) -> Array:
            if one_by_one:
                return expert_outputs(x, experts, weights, valid, *stacks, limit=self.limit, numerics=numerics)
            return moe_experts(
                x, experts, weights, valid, *stacks, limit=self.limit, numerics=numerics, ranks=devices.expert_devices
            )

        local = jax.tree.leaves(stacks)[0].shape[0]
        y = routed_experts(devices, local, apply, x, experts, weights, valid)
        return sum_of_experts(y) if one_by_one else y


def expert_load(chosen: Sequence[Int[Array, "_ k"]], experts: int) -> Int32[Array, "layers experts"]:
    """How many tokens each expert got, from what the `MoE` of each layer returned; counted once for all layers."""
    number = len(chosen) * experts
    places = [jnp.where(ids < experts, layer * experts + ids, number).reshape(-1) for layer, ids in enumerate(chosen)]
    counts = jnp.zeros(number, jnp.int32).at[jnp.concatenate(places)].add(1, mode="drop")
    return counts.reshape(-1, experts)


def sqrt_softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """√(log(1 + eˣ)); below -20, where log(1 + eˣ) = eˣ in fp32, as e^(x/2), which underflows much later."""
    return jnp.where(x < -20, jnp.exp(x / 2), jnp.sqrt(nn.softplus(jnp.maximum(x, -20))))
