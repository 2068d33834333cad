"""Whether the GPU kernels can run a model here."""

import dataclasses
import functools

import jax

from dsv4jax.batch import DecodeBucket, decode_batch
from dsv4jax.cache import CacheConfig, init_cache
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import Numerics
from dsv4jax.packing import param_shapes
from dsv4jax.quant import ceil_div
from dsv4jax.steps import decode_step
from pallas_kernels.device import hopper_obstacle


def with_implementation(
    numerics: Numerics, name: str | None, cfg: ModelConfig, page_size: int = CacheConfig.page_size
) -> tuple[Numerics, str | None]:
    """`numerics` with the implementation `name`.

    Args:
      name: "reference", "pallas", or None for "pallas" where the kernels can run the model and "reference" elsewhere.
      page_size: of the cache, in tokens.

    Returns:
      The numerics, and why they are not "pallas" if `name` is None and they are not.

    Raises:
      ValueError: `name` is unknown, or "pallas" and the kernels cannot run; the message says why.
    """
    if name not in (None, "reference", "pallas"):
        raise ValueError(f'implementation = {name!r}: must be "reference", "pallas" or None')
    reference, pallas = (dataclasses.replace(numerics, implementation=i) for i in ("reference", "pallas"))
    if name == "reference":
        return reference, None
    obstacle = hopper_obstacle() or _model_obstacle(cfg, pallas, page_size)
    if name == "pallas" and obstacle:
        raise ValueError(f'implementation = "pallas": {obstacle}')
    return (reference, obstacle) if obstacle else (pallas, None)


def _model_obstacle(cfg: ModelConfig, numerics: Numerics, page_size: int) -> str | None:
    """Why the kernels do not take a model's sizes, or None: what they say themselves of a step of one token.

    Its context is long enough for the selection, and its restriction to candidate blocks, to take part.
    """
    entries = 1 + max(cfg.index_topk, cfg.candidate_topk_blocks * cfg.candidate_block_size)
    cache_cfg = CacheConfig(slots=1, pages=ceil_div(2 * entries, page_size), page_size=page_size)
    batch = decode_batch(cfg, cache_cfg, [], DecodeBucket(1, cache_cfg.pages))
    cache = jax.eval_shape(functools.partial(init_cache, cfg, cache_cfg, numerics))
    try:
        decode_step.eval_shape(param_shapes(cfg, numerics), cache, batch, cfg=cfg, numerics=numerics)
    except ValueError as error:
        return str(error).rpartition('implementation = "pallas": ')[2]
    return None
