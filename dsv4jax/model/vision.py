"""Vision tower and aligner (architecture section 8): their weights. They do not run yet."""

from flax import nnx

from dsv4jax.config import ModelConfig, VisionConfig
from dsv4jax.weights import declare_array

RGB = 3


class Affine(nnx.Module):
    """`weight [out, in]` and, where the checkpoint has one, `bias [out]`."""

    def __init__(self, out: int, inner: int, bias: bool):
        self.weight = declare_array((out, inner), "BF16", (None, None))
        if bias:
            self.bias = declare_array((out,), "BF16", (None,))


class Scale(nnx.Module):
    """Weight of a norm."""

    def __init__(self, size: int):
        self.weight = declare_array((size,), "BF16", (None,), memory="F32")


class VisionBlock(nnx.Module):
    """`vision.blocks.N`."""

    def __init__(self, cfg: VisionConfig):
        width = cfg.hidden_size
        self.norm1 = Scale(width)
        self.norm2 = Scale(width)
        self.attn = nnx.Dict(wqkv=Affine(3 * width, width, True), wo=Affine(width, width, True))
        self.mlp = nnx.Dict(
            w1=Affine(2 * cfg.intermediate_size, width, False), w2=Affine(width, cfg.intermediate_size, False)
        )


class Vision(nnx.Module):
    """`vision`: patch embedding and encoder."""

    def __init__(self, cfg: VisionConfig):
        self.patch_embed = nnx.Dict(proj=Affine(cfg.hidden_size, RGB * cfg.patch_size**2, True))
        self.blocks = nnx.List([VisionBlock(cfg) for _ in range(cfg.num_hidden_layers)])
        self.norm = Scale(cfg.hidden_size)


class Aligner(nnx.Module):
    """`aligner`: cells of encoder outputs to text embeddings."""

    def __init__(self, cfg: ModelConfig):
        cell = cfg.vision.hidden_size * cfg.vision.downsample_ratio**2
        self.w1 = Affine(cfg.hidden_size, cell, True)
        self.w2 = Affine(cfg.hidden_size, cfg.hidden_size, True)
