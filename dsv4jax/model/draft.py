"""DSpark draft stages (architecture section 7): context keys from the model's features, and the forward of a block.

The context of a request is one ring per stage with the keys of its newest verified positions, made from features of the
model itself. A draft round runs a block of tokens once; their own keys are scratch.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from dsv4jax.cache import WINDOW_KEY
from dsv4jax.config import ModelConfig
from dsv4jax.linear import Activations, linear, linear_fp32
from dsv4jax.model.block import Block
from dsv4jax.model.hyper_connections import Residual, collapse, first_mix, settled_residual
from dsv4jax.model.layout import TileWindow, TokenLayout
from dsv4jax.model.moe import expert_load
from dsv4jax.model.norm import RMSNorm
from dsv4jax.model.rope import Rotation, rotation
from dsv4jax.numerics import Numerics
from dsv4jax.weights import declare_dense, declare_fp8, unboxed
from pallas_kernels.sparse_attention import sparse_attention
from sharding import SINGLE, ExpertPlacement, Layout
from sharding.exchange import total_over_ranks


class DraftStage(Block):
    """`mtp.N`: a window-only layer; the first stage owns the feature projection, the last the heads."""

    def __init__(self, cfg: ModelConfig, stage: int, packed: bool):
        layer = cfg.num_hidden_layers + stage
        super().__init__(cfg, layer, cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok, packed)
        hidden, rank = cfg.hidden_size, cfg.dspark_markov_rank
        if stage == 0:
            features = len(cfg.dspark_target_layer_ids) * hidden
            self.main_proj = declare_fp8(cfg, hidden, features, ("embed", None))
            self.main_norm = RMSNorm(hidden, cfg.rms_norm_eps, "embed")
        if stage == cfg.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(hidden, cfg.rms_norm_eps, "embed")
            self.markov_head = nnx.Dict(
                embed=declare_dense(cfg.vocab_size, rank, ("vocab", None)),
                head=declare_dense(cfg.vocab_size, rank, ("vocab", None)),
            )
            self.confidence_head = nnx.Dict(proj=declare_dense(1, hidden + rank, (None, None), memory="F32"))

    def context(self, features: Float[Array, "tokens features"], numerics: Numerics) -> Float[Array, "tokens hidden"]:
        """First stage: the projected features, shared by all stages (7.2)."""
        return self.main_norm(linear(features, self.main_proj, numerics))

    def context_key(self, context: Float[Array, "tokens hidden"], by: Rotation, numerics: Numerics) -> Array:
        """Record of each verified position for the ring of this stage (7.3: no `attn_norm`)."""
        return WINDOW_KEY.store(self.attn.window_key(Activations(context), by, numerics), numerics)

    def attend(
        self,
        x: Activations,
        layout: TokenLayout,
        windows: TileWindow,
        by: Rotation,
        ring: Array,
        numerics: Numerics,
        devices: Layout = SINGLE,
    ) -> Float[Array, "tokens hidden"]:
        """Attention of the blocks of `layout` over their context in the ring and over themselves."""
        _, q = self.attn.query(x, by, numerics)
        key = WINDOW_KEY.store(self.attn.window_key(x, by, numerics), numerics)
        # The kernel knows causal windows only.
        o = sparse_attention(
            q, key, ring, layout, windows, by, self.attn.attn_sink[...], numerics=numerics, implementation="reference"
        )
        return self.attn.project(o, numerics, devices)

    def run(
        self,
        residual: Residual,
        layout: TokenLayout,
        windows: TileWindow,
        by: Rotation,
        ring: Array,
        numerics: Numerics,
        devices: Layout = SINGLE,
        placement: tuple[Array, Array] | None = None,
    ) -> tuple[Residual, Int[Array, "tokens k"]]:
        """Both sublayers over the blocks of `layout`: what the next stage enters with, and each token's experts."""
        streams, x, mix = self.enter("hc_attn", residual, numerics)
        y = self.attend(x, layout, windows, by, ring, numerics, devices)
        streams, x, mix = self.enter("hc_ffn", Residual(streams, y, mix), numerics)
        y, chosen = self.ffn(x, layout.valid, layout.image_mask, numerics, devices, placement)
        return Residual(streams, y, mix), chosen

    def markov_embedding(self, tokens: Int32[Array, " rows"]) -> Float[Array, "rows rank"]:
        """Last stage: what a token tells about the one after it, fp32."""
        return unboxed(self.markov_head["embed"]).weight[tokens].astype(jnp.float32)

    def markov_logits(self, embedding: Float[Array, "rows rank"]) -> Float[Array, "rows vocab"]:
        """Last stage: added to the logits of the token that follows."""
        return linear_fp32(embedding, self.markov_head["head"])

    def confidence(
        self, hidden: Float[Array, "rows hidden"], embedding: Float[Array, "rows rank"]
    ) -> Float[Array, " rows"]:
        """Last stage: logit of the probability that the token drafted here is accepted if those before it are.

        Args:
          hidden: the collapsed streams, not normalised (7.4).
        """
        rows = jnp.concatenate([hidden.astype(jnp.float32), embedding], -1)
        return linear_fp32(rows, self.confidence_head["proj"])[:, 0]


def store_context(
    stages: Sequence[DraftStage],
    features: Float[Array, "tokens features"],
    layout: TokenLayout,
    rings: tuple[Array, ...],
    numerics: Numerics,
) -> tuple[Array, ...]:
    """The rings of all stages with the keys of the tokens of `layout` (7.3)."""
    context = stages[0].context(features, numerics)
    by = rotation(stages[0].cfg, layout.positions, compressed=False)

    def written(stage: DraftStage, ring: Array) -> Array:
        at = layout.write_slots(ring.shape[1]), layout.positions % ring.shape[1]
        return ring.at[at].set(stage.context_key(context, by, numerics), mode="drop")

    return tuple(written(stage, ring) for stage, ring in zip(stages, rings, strict=True))


def block_windows(layout: TokenLayout, window: int) -> TileWindow:
    """Every token of a block reads the whole block and the `window` positions before it, from the ring (7.4)."""
    offsets = jnp.arange(-window, layout.tile, dtype=jnp.int32)
    keys = layout.starts[:, None] + offsets
    index = jnp.arange(keys.shape[0], dtype=jnp.int32)[:, None] * layout.tile + offsets
    return TileWindow(
        in_step=jnp.broadcast_to(offsets >= 0, keys.shape),
        step_index=jnp.clip(index, 0, layout.positions.shape[0] - 1),
        slots=layout.slots,
        positions=keys,
        visible=(keys >= 0)[:, None] & layout.tiles(layout.valid)[..., None],
    )


def block_hidden(
    stages: Sequence[DraftStage],
    embeddings: Float[Array, "tokens hidden"],
    layout: TokenLayout,
    rings: tuple[Array, ...],
    numerics: Numerics,
    devices: Layout = SINGLE,
    placement: ExpertPlacement | None = None,
) -> tuple[Float[Array, "tokens hidden"], Int[Array, "stages experts"]]:
    """Runs the blocks of `layout` through all stages.

    Returns the collapsed streams behind the last stage, not normalised, and how many tokens of all ranks each expert
    got.
    """
    cfg = stages[0].cfg
    streams = jnp.repeat(embeddings[:, None], cfg.hc_mult, 1)
    residual = settled_residual(streams, first_mix(streams.shape[0], cfg.hc_mult))
    by, windows = rotation(cfg, layout.positions, compressed=False), block_windows(layout, cfg.sliding_window)
    chosen = []
    for i, (stage, ring) in enumerate(zip(stages, rings, strict=True)):
        where = placement and (placement.slots[i], placement.counts[i])
        residual, experts = stage.run(residual, layout, windows, by, ring, numerics, devices, where)
        chosen.append(experts)
    load = total_over_ranks(devices, expert_load(chosen, cfg.dspark_n_routed_experts))
    return collapse(residual.settled(), residual.mix.pre), load
