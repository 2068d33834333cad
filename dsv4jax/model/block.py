"""One transformer layer: two sublayers between hyper-connection sites (architecture section 2.1)."""

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4jax.cache import Cache
from dsv4jax.config import ModelConfig
from dsv4jax.linear import Activations
from dsv4jax.model.attention import Attention
from dsv4jax.model.hyper_connections import Mix, Residual, collapse, predict_mix
from dsv4jax.model.indexer import Selection
from dsv4jax.model.layout import TileWindow, TokenLayout
from dsv4jax.model.moe import MoE
from dsv4jax.model.norm import RMSNorm
from dsv4jax.model.rope import Rotation
from dsv4jax.numerics import Numerics
from dsv4jax.weights import declare_array
from pallas_kernels.hyper_connections import SiteWeights, hyper_connection_site
from sharding import SINGLE, Layout


class Block(nnx.Module):
    """Weights of a layer or of a draft stage, and the layer's forward pass."""

    def __init__(self, cfg: ModelConfig, layer: int, experts: int, experts_per_token: int, packed: bool):
        self.cfg = cfg
        self.attn = Attention(cfg, layer)
        self.attn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, "embed")
        self.ffn = MoE(cfg, experts, experts_per_token, packed)
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

    def mix(self, site: str, streams: Float[Array, "tokens streams hidden"]) -> Mix:
        """The coefficients a site predicts."""
        fn, base, scale = (getattr(self, f"{site}_{part}")[...] for part in ("fn", "base", "scale"))
        return predict_mix(streams, fn, base, scale, self.cfg)

    @jax.named_scope("hyper_connections")
    def enter(
        self, site: str, residual: Residual, numerics: Numerics
    ) -> tuple[Float[Array, "tokens streams hidden"], Activations, Mix]:
        """At site `hc_attn` or `hc_ffn`: the settled streams, the input of the sublayer, and the mix predicted here.

        The sublayer's input is collapsed with the mix carried by `residual` and normalised.
        """
        norm = {"hc_attn": self.attn_norm, "hc_ffn": self.ffn_norm}[site]
        if numerics.implementation == "pallas":
            fn, base, scale = (getattr(self, f"{site}_{part}").get_value() for part in ("fn", "base", "scale"))
            weights = SiteWeights(fn, base, scale, norm.weight.get_value())
            streams, x, quantized, mix = hyper_connection_site(residual, weights, self.cfg, implementation="pallas")
            return streams, Activations(x, quantized), mix
        streams = residual.settled()
        return streams, Activations(norm(collapse(streams, residual.mix.pre))), self.mix(site, streams)

    def __call__(
        self,
        streams: Float[Array, "tokens streams hidden"],
        x: Activations,
        mix: Mix,
        layout: TokenLayout,
        windows: TileWindow,
        by: Rotation,
        cache: Cache,
        selection: Selection | None,
        numerics: Numerics,
        devices: Layout = SINGLE,
        placement: tuple[Array, Array] | None = None,
    ) -> tuple[Residual, Cache, Selection | None, Int[Array, "tokens k"]]:
        """Both sublayers, given what `enter("hc_attn", ...)` returned.

        Args:
          placement: slots and counts of this layer, see `ExpertPlacement`.

        Returns what the next layer enters with, cache, selection in force, and the experts of each token as `MoE`.
        """
        y, cache, selection = self.attn(x, layout, windows, by, cache, selection, numerics, devices)
        streams, x, mix = self.enter("hc_ffn", Residual(streams, y, mix), numerics)
        y, chosen = self.ffn(x, layout.valid, layout.image_mask, numerics, devices, placement)
        return Residual(streams, y, mix), cache, selection, chosen
