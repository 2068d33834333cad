"""One transformer layer: two sublayers between hyper-connection sites (architecture section 2.1)."""

from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4jax.cache import Cache
from dsv4jax.config import ModelConfig
from dsv4jax.model.attention import Attention
from dsv4jax.model.hyper_connections import Mix, collapse, expand, predict_mix
from dsv4jax.model.indexer import Selection
from dsv4jax.model.layout import TileWindow, TokenLayout
from dsv4jax.model.moe import MoE
from dsv4jax.model.norm import RMSNorm
from dsv4jax.model.rope import Rotation
from dsv4jax.numerics import Numerics
from dsv4jax.weights import declare_array


class Block(nnx.Module):
    """Weights of a layer or of a draft stage, and the layer's forward pass."""

    def __init__(self, cfg: ModelConfig, layer: int, experts: int, experts_per_token: int):
        self.cfg = cfg
        self.attn = Attention(cfg, layer)
        self.attn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, "embed")
        self.ffn = MoE(cfg, experts, experts_per_token)
        self.ffn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, "embed")
        mixes = (2 + cfg.hc_mult) * cfg.hc_mult
        for site in ("hc_attn", "hc_ffn"):
            setattr(
                self,
                f"{site}_fn",
                declare_array((mixes, cfg.hc_mult * cfg.hidden_size), "F32", (None, "embed")),
            )
            setattr(self, f"{site}_base", declare_array((mixes,), "F32", (None,)))
            setattr(self, f"{site}_scale", declare_array((3,), "F32", (None,)))

    def attention_input(
        self, streams: Float[Array, "tokens streams hidden"], pre: Float[Array, "tokens streams"]
    ) -> Float[Array, "tokens hidden"]:
        """Collapse with the carried mix, then normalise."""
        return self.attn_norm(collapse(streams, pre))

    def mix(self, site: str, streams: Float[Array, "tokens streams hidden"]) -> Mix:
        """The coefficients a site predicts."""
        fn, base, scale = (getattr(self, f"{site}_{part}")[...] for part in ("fn", "base", "scale"))
        return predict_mix(streams, fn, base, scale, self.cfg)

    def __call__(
        self,
        streams: Float[Array, "tokens streams hidden"],
        x: Float[Array, "tokens hidden"],
        layout: TokenLayout,
        windows: TileWindow,
        by: Rotation,
        cache: Cache,
        selection: Selection | None,
        numerics: Numerics,
    ) -> tuple[Array, Array, Cache, Selection | None, Int[Array, " experts"]]:
        """Both sublayers, given `attention_input(...)` as x.

        Returns streams, the input mix carried to the next layer, cache, selection in force, expert load.
        """
        mix = self.mix("hc_attn", streams)
        y, cache, selection = self.attn(x, layout, windows, by, cache, selection, numerics)
        streams = expand(y, streams, mix)
        after = self.mix("hc_ffn", streams)
        y, load = self.ffn(self.ffn_norm(collapse(streams, mix.pre)), layout.valid, layout.image_mask, numerics)
        return expand(y, streams, after), after.pre, cache, selection, load
