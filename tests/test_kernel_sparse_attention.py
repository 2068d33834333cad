"""Sparse attention: what the reference computes, what the kernel refuses, its lowering, and parity on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lowered_for_hopper, needs_hopper, needs_no_hopper

from dsv4jax.model.layout import TokenLayout, tile_windows
from dsv4jax.model.rope import Rotation
from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.quant import pack_fp8, pack_nvfp4
from pallas_kernels.sparse_attention import kernel, sparse_attention
from pallas_kernels.sparse_attention.arg_specs import (
    ARG_SPECS,
    DIM,
    HEADS,
    PAGE_ENTRIES,
    PAIRS,
    SELECTED,
    SLACK,
    WINDOW,
    ArgSpec,
)

PLAIN = Numerics(dtype=jnp.float32, quantize_cache=False)


@dataclasses.dataclass(frozen=True)
class Sizes:
    heads: int = HEADS
    dim: int = DIM
    pairs: int = PAIRS
    window: int = WINDOW
    selected: int = SELECTED
    slack: int = SLACK
    per_page: int = PAGE_ENTRIES
    pages: int = 64


def make_layout(starts, tile, rng, slots, table, floors=None, valid=None) -> TokenLayout:
    requests = len(starts)
    starts = np.asarray(starts, np.int32)
    positions = (starts[:, None] + np.arange(tile, dtype=np.int32)).reshape(-1)
    valid = np.ones(requests * tile, bool) if valid is None else valid
    arrays = dict(
        positions=positions,
        valid=valid,
        image_mask=np.zeros_like(valid),
        tile_requests=np.arange(requests, dtype=np.int32),
        slots=rng.permutation(slots)[:requests].astype(np.int32),
        starts=starts,
        ends=starts + tile,
        floors=np.zeros(requests, np.int32) if floors is None else np.asarray(floors, np.int32),
        write_starts=starts,
        page_table=table,
    )
    return TokenLayout(**jax.tree.map(jnp.asarray, arrays), num_slots=slots, tile=tile)


def make_case(starts, tile, sizes: Sizes, seed=0, floors=None, valid=None):
    """Arguments of `sparse_attention` as plain values: window keys, ring and pool in float32."""
    rng = np.random.default_rng(seed)
    requests = len(starts)
    slots, ring = requests + 1, sizes.window + sizes.slack
    table = rng.permutation(sizes.pages)[: requests * (sizes.pages // requests)].reshape(requests, -1)
    layout = make_layout(starts, tile, rng, slots, table.astype(np.int32), floors, valid)
    tokens = requests * tile

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    selected = np.full((tokens, sizes.selected), -1, np.int32)
    for token, position in enumerate(np.asarray(layout.positions)):
        have = min((position + 1) // 2, table.shape[1] * sizes.per_page)
        some = rng.permutation(have)[: sizes.selected]
        selected[token, rng.permutation(sizes.selected)[: len(some)]] = some
    angle = normal(tokens, sizes.pairs)
    case = dict(
        q=normal(tokens, sizes.heads, sizes.dim),
        keys=normal(tokens, sizes.dim),
        ring=normal(slots, ring, sizes.dim),
        layout=layout,
        windows=tile_windows(layout, sizes.window),
        by=Rotation(jnp.cos(angle), jnp.sin(angle)),
        sink=normal(sizes.heads),
        pool=normal(sizes.pages, sizes.per_page, sizes.dim),
        selected=selected,
    )
    return jax.tree.map(jnp.asarray, case)


def in_order(case):
    return [case[name] for name in ("q", "keys", "ring", "layout", "by", "sink", "pool", "selected")]


def packed(case):
    """The same case with records in the caches; what no query may read is NaN."""
    layout = case["layout"]
    ring = np.array(pack_fp8(jnp.asarray(case["ring"])))
    written = np.zeros(ring.shape[:2], bool)
    for slot, start in zip(np.asarray(layout.slots), np.asarray(layout.starts), strict=True):
        written[slot, np.arange(max(0, start - WINDOW), start) % ring.shape[1]] = True
    ring[~written] = 0xFF
    return case | dict(
        q=jnp.asarray(case["q"], jnp.bfloat16),
        keys=pack_fp8(jnp.asarray(case["keys"])),
        ring=jnp.asarray(ring),
        pool=pack_nvfp4(jnp.asarray(case["pool"])),
    )


def one_by_one(case, window, per_page):
    """Section 3.6 in float64, a token and a head at a time."""
    case = jax.tree.map(np.asarray, case)
    layout = case["layout"]
    out = np.zeros(case["q"].shape)
    for token, position in enumerate(layout.positions):
        request = token // layout.tile
        if not layout.valid[token]:
            continue
        rows = []
        for p in range(max(position - window + 1, layout.floors[request], 0), position + 1):
            behind = position - p
            in_step = p >= layout.starts[request]
            rows.append(
                case["keys"][token - behind]
                if in_step
                else case["ring"][layout.slots[request], p % case["ring"].shape[1]]
            )
        if case["pool"] is not None:
            for entry in case["selected"][token]:
                if entry >= 0:
                    rows.append(case["pool"][layout.page_table[request, entry // per_page], entry % per_page])
        k = np.stack(rows).astype(np.float64)
        scores = case["q"][token] @ k.T / np.sqrt(k.shape[1])
        top = scores.max(-1, keepdims=True)
        p = np.exp(scores - top)
        out[token] = p @ k / (p.sum(-1, keepdims=True) + np.exp(case["sink"][:, None] - top))
    pairs = case["by"].cos.shape[-1]
    turn = (np.asarray(case["by"].cos) - 1j * np.asarray(case["by"].sin))[:, None]
    tail = (out[..., -2 * pairs :: 2] + 1j * out[..., 1 - 2 * pairs :: 2]) * turn
    out[..., -2 * pairs :: 2], out[..., 1 - 2 * pairs :: 2] = tail.real, tail.imag
    return out


SMALL = Sizes(heads=2, dim=32, pairs=4, window=8, selected=6, slack=3, per_page=4, pages=12)


@pytest.mark.parametrize("tile", [1, 3])
@pytest.mark.parametrize("entries", [True, False])
def test_reference(tile, entries):
    floors = [0, 0, 30]
    valid = np.ones(3 * tile, bool)
    valid[tile] = False
    case = make_case([0, 9, 33], tile, SMALL, floors=floors, valid=valid)
    if not entries:
        case |= dict(pool=None, selected=None)
    got = sparse_attention(**case, numerics=PLAIN, implementation="reference")
    np.testing.assert_allclose(got, one_by_one(case, SMALL.window, SMALL.per_page), rtol=2e-5, atol=2e-6)


def test_no_tokens():
    case = make_case([4], 1, SMALL)
    cut = jax.tree.map(lambda x: x[:0], {k: case[k] for k in ("q", "keys", "by", "selected")})
    layout = case["layout"]
    layout = layout.replace(**{name: getattr(layout, name)[:0] for name in ("positions", "valid", "tile_requests")})
    none = dict(layout=layout, windows=tile_windows(layout, SMALL.window))
    got = sparse_attention(**(case | cut | none), numerics=PLAIN)
    assert got.shape == (0, 2, 32)


def test_unknown_implementation():
    with pytest.raises(ValueError, match="implementation = 'triton'"):
        sparse_attention(**make_case([4], 1, SMALL), numerics=PLAIN, implementation="triton")


def test_refusals_say_why():
    run = functools.partial(sparse_attention, **make_case([4], 1, SMALL), implementation="pallas")
    with pytest.raises(ValueError, match=r'implementation = "pallas": q is float32 \[1, 2, 32\]: must be bfloat16'):
        run(numerics=REFERENCE)
    with pytest.raises(ValueError, match=r'implementation = "pallas": numerics\.quantize_cache is False'):
        run(numerics=PLAIN)
    with pytest.raises(ValueError, match="the window is 7: must be 128"):
        full = make_case([4], 1, dataclasses.replace(Sizes(), pages=1))
        full |= dict(windows=tile_windows(full["layout"], 7))
        sparse_attention(**packed(full), numerics=REFERENCE, implementation="pallas")


@needs_no_hopper
def test_needs_a_gpu():
    case = packed(make_case([4], 1, dataclasses.replace(Sizes(), pages=1)))
    with pytest.raises(ValueError, match="the device is cpu: must be a Hopper GPU"):
        sparse_attention(**case, numerics=REFERENCE, implementation="pallas")
    want = sparse_attention(**case, numerics=REFERENCE, implementation="reference")
    assert np.array_equal(sparse_attention(**case, numerics=REFERENCE), want)


def structs(spec: ArgSpec, sizes=Sizes()):
    s = jax.ShapeDtypeStruct
    i32 = functools.partial(s, dtype=jnp.int32)
    tokens, requests = spec.tokens, spec.requests
    per_token, per_request = i32((tokens,)), i32((requests,))
    per_tile = i32((tokens // spec.tile,))
    layout = TokenLayout(
        positions=per_token,
        valid=s((tokens,), jnp.bool_),
        image_mask=s((tokens,), jnp.bool_),
        tile_requests=per_tile,
        slots=per_request,
        starts=per_request,
        ends=per_request,
        floors=per_request,
        write_starts=per_request,
        page_table=i32((requests, 2048)),
        num_slots=requests,
        tile=spec.tile,
    )
    angle = s((tokens, PAIRS), jnp.float32)
    return (
        s((tokens, HEADS, DIM), jnp.bfloat16),
        s((tokens, 528), jnp.uint8),
        s((requests, WINDOW + SLACK, 528), jnp.uint8),
        layout,
        jax.eval_shape(functools.partial(tile_windows, window=WINDOW), layout),
        Rotation(angle, angle),
        s((HEADS,), jnp.float32),
        s((sizes.pages, PAGE_ENTRIES, 288), jnp.uint8) if spec.entries else None,
        i32((tokens, SELECTED)) if spec.entries else None,
    )


@pytest.mark.parametrize("name", ARG_SPECS)
def test_lowers_for_cuda(name):
    run = functools.partial(sparse_attention, numerics=REFERENCE, implementation="pallas")
    assert "mosaic_gpu" in lowered_for_hopper(run, *structs(ARG_SPECS[name]))


@needs_hopper
@pytest.mark.parametrize("splits", kernel.SPLITS)
@pytest.mark.parametrize("entries", [True, False])
@pytest.mark.parametrize("tile", [1, 6])
def test_kernel_against_reference(tile, entries, splits):
    starts = [0, 5, 127, 128, 135, 1000, 1000, 1000, 1500]
    valid = np.ones(len(starts) * tile, bool)
    valid[7 * tile] = False
    sizes = Sizes(pages=25 * len(starts))
    case = packed(make_case(starts, tile, sizes, floors=[0] * 5 + [1000, 940, 0, 0], valid=valid))
    case["selected"] = case["selected"].at[8 * tile, 40:].set(-1)
    if not entries:
        case |= dict(pool=None, selected=None)
    want = sparse_attention(**case, numerics=REFERENCE, implementation="reference")
    got = kernel.sparse_attention(*in_order(case), splits=splits)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.linalg.norm(got - want, axis=-1) / np.maximum(np.linalg.norm(want, axis=-1), 1e-30)
    assert np.all(got[7 * tile] == 0)
    assert np.nanmax(error) < 1e-2 and np.linalg.norm(got - want) < 4e-3 * np.linalg.norm(want)


@needs_hopper
@pytest.mark.parametrize("splits", kernel.SPLITS)
def test_padding(splits):
    """Prefill-like: more queries than blocks, each request but the first with padding behind its tokens."""
    lengths, tile = np.array([64, 0, 1, 63, 40]), 64
    case = packed(make_case([2000, 0, 300, 64, 900], tile, Sizes(pages=200), valid=valid_of(lengths, tile)))
    want = sparse_attention(**case, numerics=REFERENCE, implementation="reference")
    got = kernel.sparse_attention(*in_order(case), splits=splits)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.all(got[~valid_of(lengths, tile)] == 0)
    assert np.linalg.norm(got - want) < 4e-3 * np.linalg.norm(want)


def valid_of(lengths, tile):
    return (np.arange(tile) < lengths[:, None]).reshape(-1)


@needs_hopper
def test_kernel_repeats():
    case = packed(make_case([700] * 8, 1, Sizes(pages=128)))
    first, second = (np.asarray(kernel.sparse_attention(*in_order(case)), np.float32) for _ in range(2))
    assert np.array_equal(first, second)
