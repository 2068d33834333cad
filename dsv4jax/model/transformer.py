"""The whole model: embedding, layers, head, and the weights of draft and vision (architecture section 2.1)."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from dsv4jax.batch import StepBatch
from dsv4jax.cache import Cache
from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import DEAD, rows_on_device
from dsv4jax.linear import linear_fp32
from dsv4jax.model.block import Block
from dsv4jax.model.draft import DraftStage, store_context
from dsv4jax.model.engram import Engram
from dsv4jax.model.hyper_connections import collapse, first_mix, settled_residual
from dsv4jax.model.indexer import Selection
from dsv4jax.model.layout import TileWindow, TokenLayout, decoder_layout, full_layout, newest_layout, tile_windows
from dsv4jax.model.moe import expert_load
from dsv4jax.model.norm import RMSNorm
from dsv4jax.model.rope import Rotation, rotation
from dsv4jax.model.vision import Aligner, Vision
from dsv4jax.numerics import Numerics
from dsv4jax.weights import declare_array, declare_dense, dequantize
from sharding import SINGLE, ExpertPlacement, Layout
from sharding.exchange import total_over_ranks


class Layer(Block):
    """`layers.N`: a backbone layer, with Engram where the config has it."""

    def __init__(self, cfg: ModelConfig, layer: int, tables_on_device: bool, packed: bool):
        super().__init__(cfg, layer, cfg.n_routed_experts, cfg.num_experts_per_tok, packed)
        if layer in cfg.engram_layer_ids:
            self.engram = Engram(cfg, cfg.engram_layer_ids.index(layer), tables_on_device)


@flax.struct.dataclass
class TextOutput:
    """Result of the text stack for the tokens of `layout`: all tokens of the step, or its tail in bounded replay."""

    hidden: Float[Array, "tokens hidden"]
    """After the final norm: input of the head."""
    layout: TokenLayout
    cache: Cache
    expert_load: Int[Array, "layers experts"]
    """Valid tokens of all ranks routed to each expert."""
    selections: tuple[Int32[Array, "tokens topk"], ...]
    """Entries selected by each index source, ascending, -1 = none."""
    streams: tuple[Float[Array, "tokens streams hidden"], ...]
    """Streams entering each layer."""


class Model(nnx.Module):
    """DeepSeek-V4.1-Flash. Attribute paths are the tensor names of the released checkpoint.

    With `packed` the modules hold what `pack_params` makes of the checkpoint's tensors for the kernels.
    """

    def __init__(self, cfg: ModelConfig, tables_on_device: bool = True, packed: bool = False):
        self.cfg = cfg
        hidden = cfg.hidden_size
        self.embed = declare_dense(cfg.vocab_size, hidden, ("vocab", "embed"))
        self.layers = nnx.List([Layer(cfg, i, tables_on_device, packed) for i in range(cfg.num_hidden_layers)])
        self.norm = RMSNorm(hidden, cfg.rms_norm_eps, "embed")
        self.head = declare_dense(cfg.vocab_size, hidden, ("vocab", "embed"))
        for name in ("image_start", "image_end", "image_newline"):
            setattr(self, name, declare_array((hidden,), "BF16", ("embed",)))
        self.mtp = nnx.List([DraftStage(cfg, i, packed) for i in range(cfg.num_nextn_predict_layers)])
        self.vision = Vision(cfg.vision)
        self.aligner = Aligner(cfg)
        self.engram_token_map = declare_array((cfg.vocab_size,), "I32", ("vocab",), derived=True)

    def text(
        self,
        batch: StepBatch,
        cache: Cache,
        *,
        decode: bool,
        numerics: Numerics,
        devices: Layout = SINGLE,
        placement: ExpertPlacement | None = None,
    ) -> TextOutput:
        """Runs the layers over one step; logits follow from `logits(output.hidden)` for the rows that need them.

        A cache with draft rings also gets the context keys of the newest tokens of each request.
        """
        cfg = self.cfg
        _check_fit(batch, cache, cfg, numerics)
        layout = full_layout(batch, decode)
        rows, cache = self._engram_rows(batch, layout, cache, decode)
        streams = jnp.repeat(self._embed(batch, numerics)[:, None], cfg.hc_mult, 1)
        residual = settled_residual(streams, first_mix(streams.shape[0], cfg.hc_mult))
        selection: Selection | None = None
        tables, windows = self._positions(layout)
        chosen, selections, seen, features = [], [], [], []
        newest, newest_rows = newest_layout(layout, batch, cfg.sliding_window)
        for i, layer in enumerate(self.layers):
            if i in cfg.engram_layer_ids:
                row = rows[cfg.engram_layer_ids.index(i)]
                if batch.engram_rows:
                    values = dequantize(row, numerics.dtype)
                else:
                    values = layer.engram.lookup(row, numerics.dtype, devices)
                seen.append(residual.settled())
                streams = layer.engram(seen[-1], values, layout.valid & ~layout.image_mask, numerics)
                residual = settled_residual(streams, residual.mix.pre)
            streams, x, mix = layer.enter("hc_attn", residual, numerics)
            if i not in cfg.engram_layer_ids:
                seen.append(streams)
            if cache.draft_windows and i in cfg.dspark_target_layer_ids:
                rows_of_newest = seen[-1] if newest_rows is None else seen[-1][newest_rows]
                features.append(jnp.mean(rows_of_newest.astype(jnp.float32), 1).astype(numerics.dtype))
            if i in cfg.kv_source_layer_ids:
                cache = layer.attn.store_entries(x.values, layout, cache, numerics)
            if i == cfg.decoder_start:
                layout, take = decoder_layout(layout, batch, cfg.sliding_window)
                tables, windows = self._positions(layout)
                if take is not None:
                    streams, x, newest_rows = streams[take], x.take(take), None
                    mix = jax.tree.map(lambda a, take=take: a[take], mix)
            by = tables[bool(cfg.ratio(i))]
            residual, cache, selection, experts = layer(
                streams, x, mix, layout, windows, by, cache, selection, numerics, devices,
                placement and (placement.slots[i], placement.counts[i]),
            )  # fmt: skip
            chosen.append(experts)
            if i in cfg.index_source_layer_ids:
                selections.append(selection.positions)
        hidden = self.norm(collapse(residual.settled(), residual.mix.pre))
        if features:
            rings = store_context(self.mtp, jnp.concatenate(features, -1), newest, cache.draft_windows, numerics)
            cache = cache.replace(draft_windows=rings)
        load = total_over_ranks(devices, expert_load(chosen, cfg.n_routed_experts))
        return TextOutput(hidden, layout, cache, load, tuple(selections), tuple(seen))

    def embedding(self, tokens: Int32[Array, " tokens"], numerics: Numerics) -> Float[Array, "tokens hidden"]:
        """The rows of token ids."""
        return self.embed.get_value().weight[tokens].astype(numerics.dtype)

    @jax.named_scope("head")
    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """The head: a true fp32 matmul."""
        return linear_fp32(hidden, self.head)

    def _positions(self, layout: TokenLayout) -> tuple[tuple[Rotation, Rotation], TileWindow]:
        plain, yarn = (rotation(self.cfg, layout.positions, compressed) for compressed in (False, True))
        return (plain, yarn), tile_windows(layout, self.cfg.sliding_window)

    @jax.named_scope("embed")
    def _embed(self, batch: StepBatch, numerics: Numerics) -> Float[Array, "tokens hidden"]:
        e = self.embedding(batch.tokens, numerics)
        if batch.image_embeddings.shape[0]:
            rank = jnp.maximum(jnp.cumsum(batch.image_mask) - 1, 0)
            e = jnp.where(batch.image_mask[:, None], batch.image_embeddings[rank].astype(numerics.dtype), e)
        return e

    @jax.named_scope("engram")
    def _engram_rows(
        self, batch: StepBatch, layout: TokenLayout, cache: Cache, decode: bool
    ) -> tuple[tuple[Any, ...], Cache]:
        """Table rows of every token per Engram layer, and the cache with the newest compressed ids."""
        token_map, requests = self.engram_token_map[...], layout.requests
        ring, lookback = cache.ngram_ids, self.cfg.engram_max_ngram_size - 1
        ids = jnp.where(batch.image_mask, DEAD, token_map[batch.tokens])
        back = jnp.arange(1, lookback + 1)
        if decode:
            before = ring[
                jnp.minimum(batch.slots, cache.num_slots - 1)[:, None],
                (batch.starts[:, None] - back) % ring.shape[1],
            ]
            before = jnp.where(batch.starts[:, None] >= back, before, DEAD)
        else:
            before = jnp.where(batch.history < 0, DEAD, token_map[jnp.maximum(batch.history, 0)])
        history = [ids]
        since_start = layout.positions - batch.starts[requests]
        for s in range(1, lookback + 1):
            earlier = before[requests, jnp.clip(s - 1 - since_start, 0, lookback - 1)]
            history.append(jnp.where(since_start >= s, jnp.roll(ids, s), earlier))
        slots = layout.write_slots(ring.shape[1])
        cache = cache.replace(ngram_ids=ring.at[slots, layout.positions % ring.shape[1]].set(ids, mode="drop"))
        if batch.engram_rows:
            return batch.engram_rows, cache
        if not hasattr(self.layers[self.cfg.engram_layer_ids[0]].engram, "embed"):
            raise ValueError("params hold no Engram tables: the batch needs engram_rows, see `with_engram_rows`")
        pad = token_map[self.cfg.engram_pad_token_id]
        rows = rows_on_device(self.cfg, jnp.stack(history, 1), pad)
        return tuple(rows[:, i] for i in range(rows.shape[1])), cache


def _check_fit(batch: StepBatch, cache: Cache, cfg: ModelConfig, numerics: Numerics) -> None:
    """Raises ValueError if the batch was made for a cache of other sizes, or the cache for other numerics."""
    page_size = cache.entries[0].shape[1] * cfg.ratio(cfg.kv_source_layer_ids[0])
    made_for, found = (batch.num_slots, batch.page_size), (cache.num_slots, page_size)
    if made_for != found:
        raise ValueError(f"(slots, page_size): the batch was made for {made_for}, the cache has {found}")
    records = cache.entries[0].dtype
    if (records == jnp.uint8) != numerics.quantize_cache:
        raise ValueError(f"quantize_cache = {numerics.quantize_cache}: the cache holds {records} records")


@functools.lru_cache
def graphdef(cfg: ModelConfig, tables_on_device: bool = True, packed: bool = False) -> nnx.GraphDef:
    """The static half of the model."""
    return nnx.split(Model(cfg, tables_on_device, packed))[0]


def merge(cfg: ModelConfig, params: dict[str, Any]) -> Model:
    """The model with `params` in place; to be called inside a traced function."""
    first = params["layers"][cfg.engram_layer_ids[0]]
    return nnx.merge(graphdef(cfg, "embed" in first["engram"], "packed" in first["ffn"]["experts"]), params)
