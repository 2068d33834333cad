"""CSA2 attention: a sliding window plus selected compressed entries, one latent for all heads (section 3)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from dsv4jax.cache import COMPRESSED_ENTRY, INDEX_KEY, WINDOW_KEY, Cache, replace_at
from dsv4jax.config import ModelConfig
from dsv4jax.linear import Activations, joint_linear, linear
from dsv4jax.model.compressor import Compressor
from dsv4jax.model.indexer import Indexer, Selection
from dsv4jax.model.layout import TileWindow, TokenLayout
from dsv4jax.model.norm import RMSNorm
from dsv4jax.model.rope import Rotation, rotate, rotation
from dsv4jax.numerics import Numerics
from dsv4jax.weights import declare_array, declare_fp8, dequantize
from pallas_kernels.cache_write import compressed_entry, index_key, query_and_window_key
from pallas_kernels.fp8_linear import dequantize_activations, fp8_grouped_linear
from pallas_kernels.sparse_attention import sparse_attention
from sharding import SINGLE, Layout


class Attention(nnx.Module):
    """One layer's attention; KV sources also own a compressor, index sources an indexer."""

    def __init__(self, cfg: ModelConfig, layer: int):
        self.cfg = cfg
        self.layer = layer
        self.ratio = cfg.ratio(layer)
        heads, dim = cfg.num_attention_heads, cfg.head_dim
        self.wq_a = declare_fp8(cfg, cfg.q_lora_rank, cfg.hidden_size, ("q_lora", "embed"))
        self.q_norm = RMSNorm(cfg.q_lora_rank, cfg.rms_norm_eps)
        self.wq_b = declare_fp8(cfg, heads * dim, cfg.q_lora_rank, ("heads", "q_lora"))
        self.wkv = declare_fp8(cfg, dim, cfg.hidden_size, ("latent", "embed"))
        self.kv_norm = RMSNorm(dim, cfg.rms_norm_eps)
        self.attn_sink = declare_array((heads,), "F32", ("heads",))
        self.wo_a = declare_fp8(cfg, cfg.o_groups * cfg.o_lora_rank, heads * dim // cfg.o_groups, ("o_lora", None))
        self.wo_b = declare_fp8(cfg, cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank, ("embed", "o_lora"))
        if self.ratio:
            self.source = cfg.kv_source_layer_ids.index(cfg.kv_source(layer))
            if layer in cfg.kv_source_layer_ids:
                self.compressor = Compressor(cfg, layer)
            if layer in cfg.index_source_layer_ids:
                self.indexer = Indexer(cfg, layer)

    def query(
        self, x: Activations, by: Rotation, numerics: Numerics
    ) -> tuple[Float[Array, "tokens q_lora"], Float[Array, "tokens heads dim"]]:
        """The normalised low-rank query, which also feeds the indexer, and the rotated heads (3.1: no head norm)."""
        q_latent = self.q_norm(linear(x, self.wq_a, numerics))
        return q_latent, self.query_heads(q_latent, by, numerics)

    def query_heads(
        self, q_latent: Float[Array, "tokens q_lora"] | Activations, by: Rotation, numerics: Numerics
    ) -> Float[Array, "tokens heads dim"]:
        """The rotated heads."""
        dim = self.cfg.head_dim
        heads = self.wq_b.get_value().weight.shape[0] // dim
        return linear(q_latent, self.wq_b, numerics, by=by, heads=heads).reshape(-1, heads, dim)

    def window_key(self, x: Activations, by: Rotation, numerics: Numerics) -> Float[Array, "tokens dim"]:
        """Key and value of each token, before quantisation (3.2)."""
        return rotate(self.kv_norm(linear(x, self.wkv, numerics)), by)

    def query_and_window_key(
        self, x: Activations, layout: TokenLayout, by: Rotation, ring: Array, numerics: Numerics
    ) -> tuple[Float[Array, "tokens q_lora"] | Activations, Array, Array, bool]:
        """The low-rank query, the records of the window keys, and the ring, with the new keys in it or not."""
        if numerics.implementation != "pallas":
            q_latent = self.q_norm(linear(x, self.wq_a, numerics))
            return q_latent, WINDOW_KEY.store(self.window_key(x, by, numerics), numerics), ring, False
        # Rows that the new keys replace are out of reach of every query of a short step.
        most = ring.shape[1] - self.cfg.sliding_window + 1
        short = layout.most_tokens is not None and layout.most_tokens <= most
        written = (ring, layout.ring_places(ring.shape[1])) if short else ()
        projected = joint_linear(x, (self.wq_a, self.wkv), numerics)
        norms = self.q_norm.weight[...], self.kv_norm.weight[...]
        q_latent, quantized, key, new = query_and_window_key(
            projected, *norms, by, *written, eps=self.cfg.rms_norm_eps, implementation="pallas"
        )
        return Activations(q_latent, quantized), key, new if short else ring, short

    @jax.named_scope("compress")
    def store_entries(
        self, x: Float[Array, "tokens hidden"], layout: TokenLayout, cache: Cache, numerics: Numerics
    ) -> Cache:
        """A KV source's part that every token needs: compressed entries and index keys into the pages (3.4, 4.1)."""
        closes = (layout.positions + 1) % self.ratio == 0
        group = layout.positions // self.ratio
        by = rotation(self.cfg, group * self.ratio, compressed=True)
        requests = layout.requests
        write = layout.valid & closes & (layout.positions >= layout.write_starts[requests])
        entries, keys = cache.entries[self.source], cache.index_keys[self.source]
        pages, per_page = entries.shape[:2]
        page = layout.page_table[requests, jnp.minimum(group // per_page, layout.page_table.shape[1] - 1)]
        if numerics.implementation == "pallas":
            places = jnp.where(write, page * per_page + group % per_page, -1)
            kwargs = dict(eps=self.cfg.rms_norm_eps, implementation="pallas")
            pooled, open_groups = self.compressor.pooled(x, layout, cache.open_groups, numerics)
            norm = self.compressor.norm.weight[...]
            latent, entries = compressed_entry(pooled.astype(x.dtype), norm, by, entries, places, **kwargs)
            projected = linear(latent, self.indexer.wk, numerics)
            keys = index_key(projected, self.indexer.k_norm.weight[...], by, keys, places, **kwargs)
        else:
            latent, open_groups = self.compressor(x, layout, cache.open_groups, numerics)
            at = jnp.where(write, page, pages), group % per_page
            entry = COMPRESSED_ENTRY.store(rotate(latent, by), numerics)
            entries = entries.at[at].set(entry, mode="drop")
            key = INDEX_KEY.store(self.indexer.key(latent, by, numerics), numerics)
            keys = keys.at[at].set(key, mode="drop")
        return cache.replace(
            open_groups=open_groups,
            entries=replace_at(cache.entries, self.source, entries),
            index_keys=replace_at(cache.index_keys, self.source, keys),
        )

    @jax.named_scope("attention_input")
    def __call__(
        self,
        x: Activations,
        layout: TokenLayout,
        windows: TileWindow,
        by: Rotation,
        cache: Cache,
        selection: Selection | None,
        numerics: Numerics,
        devices: Layout = SINGLE,
    ) -> tuple[Float[Array, "tokens hidden"], Cache, Selection | None]:
        """Attends and returns the output, the cache with this layer's window keys, and the selection in force."""
        q_latent, key, ring, written = self.query_and_window_key(x, layout, by, cache.windows[self.layer], numerics)
        q = self.query_heads(q_latent, by, numerics)
        if self.ratio and self.layer in self.cfg.index_source_layer_ids:
            # A KV source starts afresh: selections and candidates of other entries mean nothing here.
            previous = None if self.layer in self.cfg.kv_source_layer_ids else selection
            keys = cache.index_keys[self.source]
            published = self.indexer.select(x.values, q_latent, by, keys, layout, previous, numerics)
            kept = published.candidates if previous is None else previous.candidates
            selection = published.replace(candidates=kept)

        o = self.attend(q, key, ring, layout, windows, by, cache, selection, numerics)
        if not written:
            slots = layout.write_slots(ring.shape[1])
            ring = ring.at[slots, layout.positions % ring.shape[1]].set(key, mode="drop")
        cache = cache.replace(windows=replace_at(cache.windows, self.layer, ring))
        return self.project(o, numerics, devices), cache, selection

    @jax.named_scope("sparse_attention")
    def attend(
        self,
        q: Float[Array, "tokens heads dim"],
        key: Array,
        ring: Array,
        layout: TokenLayout,
        windows: TileWindow,
        by: Rotation,
        cache: Cache,
        selection: Selection | None,
        numerics: Numerics,
    ) -> Float[Array, "tokens heads dim"]:
        """Attention over window keys of this step or the ring and over selected entries of the pages, un-rotated."""
        entries = dict(pool=cache.entries[self.source], selected=selection.positions) if self.ratio else {}
        return sparse_attention(
            q,
            key,
            ring,
            layout,
            windows,
            by,
            self.attn_sink[...],
            **entries,
            numerics=numerics,
            implementation=numerics.implementation,
        )

    @jax.named_scope("attention_output")
    def project(
        self, o: Float[Array, "tokens heads dim"], numerics: Numerics, devices: Layout
    ) -> Float[Array, "tokens hidden"]:
        """Grouped low-rank output; wo_a takes activations unquantised (3.7)."""
        wo_a = self.wo_a.get_value()
        # A device may hold some of the groups only.
        count = wo_a.weight.shape[0] // self.cfg.o_lora_rank
        groups = o.reshape(o.shape[0], count, -1)
        if numerics.implementation == "pallas":
            z = fp8_grouped_linear(groups, wo_a, quantize=True)
            return linear(Activations(dequantize_activations(z), z), self.wo_b, numerics, devices)
        wo_a = dequantize(wo_a, o.dtype).reshape(count, self.cfg.o_lora_rank, -1)
        z = jnp.einsum(
            "tgi,goi->tgo", groups, wo_a, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return linear(z.astype(o.dtype).reshape(o.shape[0], -1), self.wo_b, numerics, devices)
