"""Lightning indexer: which compressed entries a query attends to (architecture section 4)."""

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from dsv4jax.cache import INDEX_KEY
from dsv4jax.config import ModelConfig
from dsv4jax.linear import Activations, linear
from dsv4jax.model.layout import TokenLayout, over_tiles
from dsv4jax.model.norm import RMSNorm
from dsv4jax.model.rope import Rotation, rotate
from dsv4jax.numerics import Numerics
from dsv4jax.weights import declare_dense, declare_fp8
from pallas_kernels.index_select import index_select


@flax.struct.dataclass
class Selection:
    """What an index source publishes for the layers above it."""

    positions: Int32[Array, "tokens topk"]
    """Selected entries, ascending; -1 for unused places, which come last."""
    candidates: Bool[Array, "tokens blocks"] | Int32[Array, "tokens budget"] | None = None
    """Candidate blocks of the candidate source, as a mask, or for the kernels as an ascending list that -1 fills up;
    None while every block is one."""


class Indexer(nnx.Module):
    """Scores all visible entries of the KV source with a few cheap heads and keeps the best."""

    def __init__(self, cfg: ModelConfig, layer: int):
        self.cfg = cfg
        self.ratio = cfg.ratio(layer)
        self.publishes_candidates = layer == cfg.candidate_source_layer_id
        self.wq_b = declare_fp8(cfg, cfg.index_n_heads * cfg.index_head_dim, cfg.q_lora_rank, ("index_heads", "q_lora"))
        self.weights_proj = declare_dense(cfg.index_n_heads, cfg.hidden_size, ("index_heads", "embed"))
        if layer in cfg.kv_source_layer_ids:
            self.wk = declare_dense(cfg.index_head_dim, cfg.head_dim, (None, "latent"))
            self.k_norm = RMSNorm(cfg.index_head_dim, cfg.rms_norm_eps)

    def key(
        self, latent: Float[Array, "tokens latent"], by: Rotation, numerics: Numerics
    ) -> Float[Array, "tokens index"]:
        """Index keys of un-rotated latents, before quantisation."""
        return rotate(self.k_norm(linear(latent, self.wk, numerics)), by)

    def query(
        self, q_latent: Float[Array, "tokens q_lora"] | Activations, by: Rotation, numerics: Numerics
    ) -> Float[Array, "tokens heads index"]:
        """Index queries, quantised like the keys. No norm, no Hadamard transform."""
        return INDEX_KEY.rounded(self.rotated_query(q_latent, by, numerics), numerics)

    def rotated_query(
        self, q_latent: Float[Array, "tokens q_lora"] | Activations, by: Rotation, numerics: Numerics
    ) -> Float[Array, "tokens heads index"]:
        """Index queries before quantisation."""
        heads, dim = self.cfg.index_n_heads, self.cfg.index_head_dim
        return linear(q_latent, self.wq_b, numerics, by=by, heads=heads).reshape(-1, heads, dim)

    def head_weights(self, x: Float[Array, "tokens hidden"], numerics: Numerics) -> Float[Array, "tokens heads"]:
        """Weight of each index head, scaled by index_head_dim^-½ · index_n_heads^-½."""
        scale = (self.cfg.index_head_dim * self.cfg.index_n_heads) ** -0.5
        return (linear(x, self.weights_proj, numerics).astype(jnp.float32) * scale).astype(x.dtype)

    @jax.named_scope("index_select")
    def select(
        self,
        x: Float[Array, "tokens hidden"],
        q_latent: Float[Array, "tokens q_lora"] | Activations,
        by: Rotation,
        pool: Shaped[Array, "pages per_page record"],
        layout: TokenLayout,
        previous: Selection | None,
        numerics: Numerics,
    ) -> Selection:
        """Top entries of every token, restricted to the candidate blocks an earlier layer published (4.3, 4.4)."""
        cfg = self.cfg
        entries = layout.page_table.shape[1] * pool.shape[1]
        keep = min(cfg.index_topk, entries)
        visible = visible_entries(layout.positions, layout.valid, self.ratio)
        if entries <= cfg.index_topk:
            # Everything visible is selected: section 4.3 lets the scores go.
            return Selection(select_top(jnp.zeros((visible.shape[0], entries), x.dtype), visible, keep))
        many_blocks = entries > cfg.candidate_topk_blocks * cfg.candidate_block_size
        restrict = None if self.publishes_candidates or previous is None else previous.candidates

        if numerics.implementation == "pallas":
            q = self.rotated_query(q_latent, by, numerics)
            # Without the scale of the weights, which multiplies all scores and so changes no selection.
            weights = linear(x, self.weights_proj, numerics)
            positions, published = index_select(
                q, weights, pool, layout.page_table, layout.tile_requests, visible, keep, restrict,
                block_size=cfg.candidate_block_size,
                publish=cfg.candidate_topk_blocks if self.publishes_candidates and many_blocks else 0,
                implementation="pallas",
            )  # fmt: skip
            return Selection(positions, published)

        q, weights = self.query(q_latent, by, numerics), self.head_weights(x, numerics)

        def one_tile(tile):
            q, weights, visible, request, candidates = tile
            keys = INDEX_KEY.load(pool[layout.page_table[request]], numerics).reshape(entries, -1)
            scores = index_scores(q, weights, keys, numerics)
            published = None
            if self.publishes_candidates and many_blocks:
                published = candidate_blocks(scores, visible, cfg.candidate_topk_blocks, cfg.candidate_block_size)
            if candidates is not None:
                allowed = jnp.repeat(candidates, cfg.candidate_block_size, -1, total_repeat_length=None)[:, :entries]
                scores = jnp.where(allowed, scores, -jnp.inf)
            return Selection(select_top(scores, visible, keep), published)

        arguments = (
            layout.tiles(q),
            layout.tiles(weights),
            layout.tiles(visible),
            layout.tile_requests,
            None if restrict is None else layout.tiles(restrict),
        )
        selection = over_tiles(
            one_tile, arguments, (layout.tile * cfg.index_n_heads + cfg.index_head_dim) * entries * 4
        )
        return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), selection)


def visible_entries(positions: Int[Array, " tokens"], valid: Bool[Array, " tokens"], ratio: int) -> Array:
    """How many entries each query sees: groups whose last token is at or before it; 0 for padding (section 3.5)."""
    return jnp.where(valid, (positions + 1) // ratio, 0)


def index_scores(
    q: Float[Array, "queries heads index"],
    weights: Float[Array, "queries heads"],
    keys: Float[Array, "entries index"],
    numerics: Numerics,
) -> Float[Array, "queries entries"]:
    """Σ_h relu(q_h · k) · w_h; in reference mode product, weighted term and sum are each rounded (section 4.2)."""
    dots = jnp.einsum("qhd,nd->qhn", q, keys, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if numerics.fast:
        return jnp.sum(jax.nn.relu(dots) * weights[..., None].astype(jnp.float32), 1)
    terms = jax.nn.relu(dots.astype(q.dtype)) * weights[..., None]
    return jnp.sum(terms.astype(jnp.float32), 1).astype(q.dtype)


def select_top(
    scores: Float[Array, "queries entries"], visible: Int[Array, " queries"], keep: int
) -> Int32[Array, "queries keep"]:
    """The `keep` best visible entries of finite score, ascending, then -1. Ties go to the smaller index; NaN and
    -inf are never selected."""
    values, chosen = lax.top_k(_ranked(scores, visible), keep)
    last = jnp.iinfo(jnp.int32).max
    chosen = jnp.sort(jnp.where(values > -jnp.inf, chosen, last).astype(jnp.int32), -1)
    return jnp.where(chosen == last, -1, chosen)


def candidate_blocks(
    scores: Float[Array, "queries entries"], visible: Int[Array, " queries"], keep: int, size: int
) -> Bool[Array, "queries blocks"]:
    """The `keep` blocks of best maximum, the block of the newest visible entry always among them; ties go to the
    smaller block, blocks without a visible entry are dropped (section 4.4)."""
    entries = scores.shape[-1]
    padded = jnp.pad(_ranked(scores, visible), ((0, 0), (0, -entries % size)), constant_values=-jnp.inf)
    best = padded.reshape(scores.shape[0], -1, size).max(-1)
    newest = (visible - 1) // size
    best = jnp.where((jnp.arange(best.shape[1]) == newest[:, None]) & (visible > 0)[:, None], jnp.inf, best)
    values, chosen = lax.top_k(best, min(keep, best.shape[1]))
    chosen = jnp.where(values > -jnp.inf, chosen, best.shape[1])
    rows = jnp.arange(scores.shape[0])[:, None]
    return jnp.zeros(best.shape, bool).at[rows, chosen].set(True, mode="drop")


def _ranked(scores: Float[Array, "queries entries"], visible: Int[Array, " queries"]) -> Array:
    """Scores with -inf for what is not visible or NaN, and one zero: a GPU sort puts -0 below +0."""
    usable = (jnp.arange(scores.shape[-1]) < visible[:, None]) & (scores > -jnp.inf)
    return jnp.where(usable, jnp.where(scores == 0, 0, scores), -jnp.inf)
