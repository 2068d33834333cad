"""Manifold hyper-connections: mixes between the residual streams and the sublayers (sections 2.1 to 2.3).

The input mix a site predicts is used by the *next* site, so it travels with the streams.
"""

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import lax, nn
from jaxtyping import Array, Float

from dsv4jax.config import ModelConfig
from dsv4jax.weights import matmul


@flax.struct.dataclass
class Mix:
    """What one site predicts from the streams, fp32."""

    pre: Float[Array, "tokens streams"]
    post: Float[Array, "tokens streams"]
    residual: Float[Array, "tokens streams streams"]


@flax.struct.dataclass
class Residual:
    """The streams before the last sublayer's output was added, that output, and the mix that its site predicted."""

    streams: Float[Array, "tokens streams hidden"]
    output: Float[Array, "tokens hidden"]
    mix: Mix

    def settled(self) -> Float[Array, "tokens streams hidden"]:
        """The streams with the output added."""
        return expand(self.output, self.streams, self.mix)


def settled_residual(streams: Float[Array, "tokens streams hidden"], pre: Float[Array, "tokens streams"]) -> Residual:
    """Streams to which nothing is left to add, with the input mix for the next site."""
    tokens, n, hidden = streams.shape
    identity = jnp.broadcast_to(jnp.eye(n, dtype=jnp.float32), (tokens, n, n))
    return Residual(streams, jnp.zeros((tokens, hidden), streams.dtype), Mix(pre, jnp.zeros_like(pre), identity))


def first_mix(tokens: int, streams: int) -> Float[Array, "tokens streams"]:
    """The carried input mix at the start of every forward pass: all weight on stream 0."""
    return jnp.zeros((tokens, streams), jnp.float32).at[:, 0].set(1.0)


def predict_mix(
    streams: Float[Array, "tokens streams hidden"],
    fn: Float[Array, "mixes flat"],
    base: Float[Array, " mixes"],
    scale: Float[Array, "3"],
    cfg: ModelConfig,
) -> Mix:
    """The coefficients of one site, HC(X; fn, base, scale); statistic after the projection, all fp32 (section 2.2)."""
    n = cfg.hc_mult
    x = streams.astype(jnp.float32).reshape(streams.shape[0], -1)
    statistic = lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + cfg.rms_norm_eps)
    m = matmul(x, fn) * statistic
    z = m * scale[np.repeat([0, 1, 2], [n, n, n * n])] + base
    return Mix(
        pre=nn.sigmoid(z[:, :n]) + cfg.hc_eps,
        post=2 * nn.sigmoid(z[:, n : 2 * n]),
        residual=sinkhorn(z[:, 2 * n :].reshape(-1, n, n), cfg.hc_sinkhorn_iters, cfg.hc_eps),
    )


def sinkhorn(logits: Float[Array, "*batch n n"], iterations: int, eps: float) -> Float[Array, "*batch n n"]:
    """Softmax over the last axis plus eps, then alternately normalised columns and rows, ending with columns."""
    c = nn.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdims=True) + eps)

    def rows_then_columns(_, c):
        c = c / (c.sum(-1, keepdims=True) + eps)
        return c / (c.sum(-2, keepdims=True) + eps)

    return lax.fori_loop(0, iterations - 1, rows_then_columns, c)


def collapse(
    streams: Float[Array, "tokens streams hidden"], pre: Float[Array, "tokens streams"]
) -> Float[Array, "tokens hidden"]:
    """Σ_s pre_s · X_s in fp32, rounded once."""
    return jnp.sum(pre[..., None] * streams.astype(jnp.float32), 1).astype(streams.dtype)


def expand(
    y: Float[Array, "tokens hidden"], streams: Float[Array, "tokens streams hidden"], mix: Mix
) -> Float[Array, "tokens streams hidden"]:
    """X'_j = post_j · y + Σ_i residual_ij · X_i in fp32, rounded once (section 2.3: the sum is over the row index)."""
    x = streams.astype(jnp.float32)
    carried = jnp.sum(mix.residual[..., None] * x[:, :, None], 1)
    return (mix.post[..., None] * y.astype(jnp.float32)[:, None] + carried).astype(streams.dtype)
