"""Engram: hashed n-gram embeddings injected into the residual streams (architecture section 6.4)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax, nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dsv4jax.config import ModelConfig
from dsv4jax.linear import linear
from dsv4jax.numerics import Numerics
from dsv4jax.weights import declare_array, declare_fp8, dequantize
from sharding import SINGLE, Layout
from sharding.exchange import table_rows


class Engram(nnx.Module):
    """One Engram layer. Without `embed` the table lives on the host and rows come with the batch."""

    def __init__(self, cfg: ModelConfig, index: int, table_on_device: bool):
        self.cfg = cfg
        if table_on_device:
            rows, dim = cfg.engram_num_embeddings[index], cfg.engram_head_dim
            self.embed = declare_fp8(cfg, rows, dim, ("engram_rows", None), block=(1, 32))
        width = cfg.engram_hash_columns * cfg.engram_head_dim
        self.wkv = declare_fp8(cfg, (cfg.hc_mult + 1) * cfg.hidden_size, width, ("engram_kv", None))
        self.q_weight = declare_array((cfg.hc_mult, cfg.hidden_size), "BF16", (None, "embed"))
        self.k_weight = declare_array((cfg.hc_mult, cfg.hidden_size), "BF16", (None, "embed"))

    @jax.named_scope("engram")
    def lookup(
        self, rows: Int[Array, "tokens columns"], dtype: DTypeLike, devices: Layout = SINGLE
    ) -> Float[Array, "tokens columns dim"]:
        """Decoded table rows."""
        return dequantize(table_rows(devices, self.embed.get_value(), rows), dtype)

    @jax.named_scope("engram")
    def __call__(
        self,
        streams: Float[Array, "tokens streams hidden"],
        rows: Float[Array, "tokens columns dim"],
        active: Bool[Array, " tokens"],
        numerics: Numerics,
    ) -> Float[Array, "tokens streams hidden"]:
        """X_s + gate_s · value; inactive tokens (image spans, padding) keep their streams."""
        cfg = self.cfg
        tokens, n, hidden = streams.shape
        kv = linear(rows.reshape(tokens, -1), self.wkv, numerics).astype(jnp.float32).reshape(tokens, n + 1, hidden)
        key, value = kv[:, :n], kv[:, n:]
        x = streams.astype(jnp.float32)
        weight = self.q_weight[...].astype(jnp.float32) * self.k_weight[...].astype(jnp.float32)

        def inverse_norm(a):
            return lax.rsqrt(jnp.mean(jnp.square(a), -1) + cfg.rms_norm_eps)

        dot = jnp.sum(x * weight * key, -1) * inverse_norm(x) * inverse_norm(key) * hidden**-0.5
        gate = nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)), dot))
        updated = (x + gate[..., None] * value).astype(streams.dtype)
        return jnp.where(active[:, None, None], updated, streams)
