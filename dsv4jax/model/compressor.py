"""Compressor: latents of token groups, un-rotated (architecture section 3.4)."""

import jax.numpy as jnp
from flax import nnx
from jax import nn
from jaxtyping import Array, Float

from dsv4jax.cache import replace_at
from dsv4jax.config import ModelConfig
from dsv4jax.linear import linear, linear_fp32
from dsv4jax.model.layout import TokenLayout
from dsv4jax.model.norm import RMSNorm
from dsv4jax.numerics import Numerics
from dsv4jax.weights import declare_dense


class Compressor(nnx.Module):
    """Pools `ratio` tokens into one latent; at ratio 1 a plain projection."""

    def __init__(self, cfg: ModelConfig, layer: int):
        self.ratio = cfg.ratio(layer)
        self.wkv = declare_dense(cfg.head_dim, cfg.hidden_size, ("latent", "embed"))
        if self.ratio == 2:
            self.wgate = declare_dense(cfg.head_dim, cfg.hidden_size, ("latent", "embed"))
        self.norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.index = [s for s in cfg.kv_source_layer_ids if cfg.ratio(s) == 2].index(layer) if self.ratio == 2 else None

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        layout: TokenLayout,
        open_groups: tuple[Array, ...],
        numerics: Numerics,
    ) -> tuple[Float[Array, "tokens latent"], tuple[Array, ...]]:
        """The latent of the group that each token closes (meaningless for tokens that close none), and the groups
        left open."""
        pooled, open_groups = self.pooled(x, layout, open_groups, numerics)
        return self.norm(pooled).astype(x.dtype), open_groups

    def pooled(
        self,
        x: Float[Array, "tokens hidden"],
        layout: TokenLayout,
        open_groups: tuple[Array, ...],
        numerics: Numerics,
    ) -> tuple[Float[Array, "tokens latent"], tuple[Array, ...]]:
        """What the norm takes: the pooled latents, rounded unless `numerics.fast`, and the groups left open."""
        if self.ratio == 1:
            return linear(x, self.wkv, numerics), open_groups
        v, s = linear_fp32(x, self.wkv), linear_fp32(x, self.wgate)
        token = jnp.stack([v, s], 1)
        ring = open_groups[self.index]
        requests = layout.requests
        group = layout.positions // 2 % ring.shape[1]
        # The first token of a group is the previous one of this step, or was kept by an earlier step.
        kept = ring[jnp.minimum(layout.slots[requests], layout.num_slots - 1), group]
        in_step = layout.positions > layout.starts[requests]
        first = jnp.where(in_step[:, None, None], jnp.roll(token, 1, 0), kept)
        pooled = pool(first[:, 0], first[:, 1], v, s)
        # The even token of the newest groups, as many as the ring has rows.
        newest = layout.write_slots(2 * ring.shape[1] - 1)
        slots = jnp.where(layout.positions % 2 == 0, newest, layout.num_slots)
        ring = ring.at[slots, group].set(token, mode="drop")
        return pooled if numerics.fast else pooled.astype(x.dtype), replace_at(open_groups, self.index, ring)


def pool(
    v0: Float[Array, "groups latent"],
    s0: Float[Array, "groups latent"],
    v1: Float[Array, "groups latent"],
    s1: Float[Array, "groups latent"],
) -> Float[Array, "groups latent"]:
    """Softmax over the two tokens of a group, separately for each channel."""
    w = nn.softmax(jnp.stack([s0, s1]), axis=0)
    return w[0] * v0 + w[1] * v1
