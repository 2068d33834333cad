"""Random weights in the released layout, for tests and measurements.

Every weight is a normal draw with statistics under which the model is well-conditioned and every term matters. A draw
takes 16 random bits and looks its value up in a table of normal quantiles, which is prepared in the stored format: a
quantised weight costs a table look-up per element, and the values are the same on every machine.
"""

import concurrent.futures
import functools
import math
import re
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int16, Int32, Shaped, UInt8, UInt16

from dsv4jax.checkpoint.placement import Index, place_leaves
from dsv4jax.checkpoint.values import convert_exactly
from dsv4jax.config import ModelConfig
from dsv4jax.params import Params, TensorInfo, abstract_params, checkpoint_inventory, named_leaves, tensor_names
from dsv4jax.quant import BLOCK
from dsv4jax.weights import STORED_DTYPES, ArraySpec
from sharding import SINGLE, Layout

_CHUNK = 1 << 16  # numbers at a time: their temporaries stay in cache
_GAINS = (-1, 0, 1)
"""Binary exponents by which blocks of a quantised weight differ, so that their scales do."""

# First match decides: (pattern of the tensor name, mean, standard deviation, whether this is per sqrt(inputs)).
_STATISTICS = tuple(
    (re.compile(pattern), mean, std, per_input)
    for pattern, mean, std, per_input in (
        (r"norm\d?\.weight$|engram\.[qk]_weight$", 1.0, 0.2, False),
        (r"attn_sink$", 0.0, 0.7, False),
        (r"gate\.bias(_vl)?$", 0.0, 0.25, False),
        (r"hc_\w+_fn$", 0.0, 1.0, True),
        (r"hc_\w+_base$", 0.0, 0.5, False),
        (r"hc_\w+_scale$", 1.0, 0.25, False),
        (r"embed\.weight$|^image_", 0.0, 1.0, False),
        (r"\.bias$", 0.0, 0.1, False),
        (r"^head\.weight$|compressor\.wgate\.weight$", 0.0, 2.0, True),
        (r"ffn\.gate\.weight$", 0.0, 1.5, True),
        (r"attn\.wo_b\.weight$|(ffn|mlp)\..*w2\.weight$", 0.0, 0.4, True),
        (r"attn\.wq_b\.weight$", 0.0, 0.7, True),
        (r"engram\.wkv\.weight$", 0.0, 0.8, True),
        (r"", 0.0, 1.1, True),
    )
)


def random_params(
    cfg: ModelConfig,
    seed: int,
    layout: Layout = SINGLE,
    *,
    tables_on_device: bool = True,
    token_map: Int32[np.ndarray, " vocab"] | None = None,
    progress: bool = False,
) -> Params:
    """Random parameters on the devices of `layout`; equal to those of a checkpoint that
    `random_tensor` filled with the same seed.

    Args:
      cfg: any configuration.
      seed: decides all values.
      layout: see `load_params`.
      tables_on_device: whether to make the Engram tables.
      token_map: `engram_token_map`; without one, token id modulo the compressed vocabulary size.
      progress: whether to show a progress bar.

    Raises:
      ValueError: a dimension that does not divide over its mesh axis, a token map of another size, or too little
        memory.
    """
    if token_map is None:
        token_map = np.arange(cfg.vocab_size, dtype=np.int32) % cfg.engram_compressed_vocab_size
    if token_map.shape != (cfg.vocab_size,):
        raise ValueError(f"token_map has shape {token_map.shape}: expected [vocab_size] = [{cfg.vocab_size}]")
    abstract = abstract_params(cfg, tables_on_device)
    specs = dict(named_leaves(abstract))

    def read(name: str, index: Index) -> np.ndarray:
        spec = specs[name]
        if spec.derived:
            return token_map[index]
        if "*" not in name:
            return random_leaf(name, spec, cfg, seed)[index]
        return _stack(tensor_names(name, spec)[index[0]], spec, cfg, seed, pool.map)[:, *index[1:]]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return place_leaves(abstract, layout, read, progress=progress, description="drawing")


def random_leaf(name: str, spec: ArraySpec, cfg: ModelConfig, seed: int) -> np.ndarray:
    """One leaf of `abstract_params(cfg)`, not a derived one; determined by name, shape and seed alone."""
    if "*" in name:
        return _stack(tensor_names(name, spec), spec, cfg, seed, map)
    return convert_exactly(name, random_tensor(name, cfg, seed), spec.dtype, (0,) * len(spec.shape))


def random_tensor(name: str, cfg: ModelConfig, seed: int) -> np.ndarray:
    """One tensor of `checkpoint_inventory(cfg)`, in its stored type; determined by name, shape and seed alone.

    Elements and scale of a quantised weight belong together: a block's scale is the smallest power of two that keeps
    its elements within the format, as a quantiser would choose it.
    """
    info = _inventory(cfg)[name]
    out = np.empty(info.shape, STORED_DTYPES[info.dtype])
    if info.dtype in ("BF16", "F32"):
        _fill_dense(out, name, seed)
    elif info.dtype == "F8_E8M0":
        weight = name.removesuffix(".scale") + ".weight"
        _fill_quantised(out, weight, _inventory(cfg)[weight], seed, scale=name)
    else:
        _fill_quantised(out, name, info, seed)
    return out


def _fill_dense(out: Shaped[np.ndarray, "..."], name: str, seed: int) -> None:
    mean, std = _statistics(name, out.shape[-1])
    table = (np.float32(mean) + np.float32(std) * _quantiles()).astype(out.dtype)
    flat = out.reshape(-1)
    for start, bits in _bits(name, seed, flat.size, _CHUNK):
        flat[start : start + bits.size] = table.take(bits)


def _fill_quantised(
    out: Shaped[np.ndarray, "rows columns"], weight: str, info: TensorInfo, seed: int, scale: str | None = None
) -> None:
    """Fills in the elements of `weight`, or its block scales if their name is given."""
    rows, columns = info.shape
    stored = info.dtype
    if stored == "I8":
        columns *= 2
    block_rows = 1 if stored == "I8" or weight.endswith("engram.embed.weight") else BLOCK
    gains = _generator(scale, seed).integers(_GAINS[0], _GAINS[-1] + 1, out.shape, np.int8) if scale else None
    rms_gain = np.sqrt(np.mean(np.exp2(2.0 * np.array(_GAINS))))
    quantiser = _quantiser(_statistics(weight, columns)[1] / float(rms_gain), stored)
    chunk_rows = max(1, _CHUNK // columns // BLOCK) * BLOCK
    for start, bits in _bits(weight, seed, rows * columns, chunk_rows * columns):
        bits = bits.reshape(-1, columns)
        levels = quantiser.level[_block_maxima(bits, block_rows)]
        first = start // columns // (block_rows if scale else 1)
        if gains is not None:
            span = slice(first, first + len(levels))
            out[span] = quantiser.lowest_scale + levels + gains[span]
            continue
        by_row = np.repeat(levels, block_rows, 0)[: len(bits)]
        codes = quantiser.codes.take(np.repeat(by_row.astype(np.intp) << 16, BLOCK, 1)[:, :columns] | bits)
        if stored == "I8":
            pairs = codes.view(np.uint16)
            codes = (pairs & 15 | pairs >> 4).astype(np.uint8)
        out[first : first + len(codes)] = codes.view(out.dtype)


class _Quantiser(NamedTuple):
    """Tables of a quantised normal distribution. A level is the exponent of a block's scale above the lowest."""

    level: UInt8[np.ndarray, "32768"]
    """By the largest magnitude in the block."""
    lowest_scale: int
    """UE8M0 byte of level 0."""
    codes: UInt8[np.ndarray, " levels_times_65536"]
    """By level and 16 random bits."""


def _stack(names: list[str], spec: ArraySpec, cfg: ModelConfig, seed: int, apply: Callable[..., Any]) -> np.ndarray:
    """The tensors `names` as one array; `apply` is `map` or a parallel one."""
    stack = np.empty((len(names), *spec.shape[1:]), spec.dtype)

    def fill(expert: int) -> None:
        stack[expert] = random_tensor(names[expert], cfg, seed)

    list(apply(fill, range(len(names))))
    return stack


@functools.lru_cache(maxsize=2)
def _inventory(cfg: ModelConfig) -> dict[str, TensorInfo]:
    return checkpoint_inventory(cfg)


@functools.lru_cache
def _quantiles() -> Float32[np.ndarray, "65536"]:
    """Standard normal value of each 16-bit number, two's complement: bits and their complement are opposite values."""
    upper = np.array([NormalDist().inv_cdf(0.5 + (i + 0.5) / 65536) for i in range(32768)], np.float32)
    return np.concatenate([upper, -upper[::-1]])


@functools.lru_cache(maxsize=16)
def _quantiser(std: float, stored: str) -> _Quantiser:
    """For elements of type `stored`, E4M3 or packed E2M1, of a normal distribution."""
    values = _quantiles() * np.float32(std)
    element, largest = (ml_dtypes.float4_e2m1fn, 6) if stored == "I8" else (ml_dtypes.float8_e4m3fn, 448)
    mantissa, exponent = np.frexp(values[:32768] / np.float32(largest))
    exponent -= mantissa == 0.5  # of the smallest power of two that is not below
    lowest, highest = int(exponent.min()), int(exponent.max())
    codes = [np.clip(np.ldexp(values, -e), -largest, largest).astype(element) for e in range(lowest, highest + 1)]
    return _Quantiser((exponent - lowest).astype(np.uint8), 127 + lowest, np.concatenate(codes).view(np.uint8))


def _statistics(name: str, inputs: int) -> tuple[float, float]:
    """Mean and standard deviation of a tensor with `inputs` columns."""
    mean, std, per_input = next(entry[1:] for entry in _STATISTICS if entry[0].search(name))
    return mean, std / math.sqrt(inputs) if per_input else std


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, *name.encode()])))


def _bits(name: str, seed: int, count: int, chunk: int) -> Iterator[tuple[int, UInt16[np.ndarray, " chunk"]]]:
    """`count` random 16-bit numbers in chunks, with the position of each; `chunk` is a multiple of 4."""
    source = _generator(name, seed).bit_generator
    for start in range(0, count, chunk):
        size = min(chunk, count - start)
        yield start, source.random_raw(-(-size // 4)).view(np.uint16)[:size]


def _block_maxima(bits: UInt16[np.ndarray, "rows columns"], block_rows: int) -> Int16[np.ndarray, "_ _"]:
    """Largest magnitude in each block, as index into the positive half of `_quantiles`; edge blocks may be partial."""
    signed = bits.view(np.int16)
    magnitude = signed ^ signed >> 15
    if block_rows > 1:
        magnitude = np.maximum.reduceat(magnitude, np.arange(0, bits.shape[0], block_rows), axis=0)
    return np.maximum.reduceat(magnitude, np.arange(0, bits.shape[1], BLOCK), axis=1)
