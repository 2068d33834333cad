"""`topk`: the reference, the kernel's per-thread code on an emulator, its lowering, and the kernel itself on a GPU."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simt_emulator
from hopper import lowered_for_hopper, needs_hopper
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.topk import arg_specs, kernel, select, topk
from pallas_kernels.topk.reference import topk_reference

CASES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "constant": lambda rng, n: np.full(n, -1.5),
    "ascending": lambda rng, n: np.arange(n) - n / 2,
    "descending": lambda rng, n: n / 2 - np.arange(n),
    "few values": lambda rng, n: rng.integers(0, 3, n),
    "zeros of both signs": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "mostly -inf": lambda rng, n: np.where(rng.random(n) < 0.999, -np.inf, rng.standard_normal(n)),
    "NaN": lambda rng, n: np.where(rng.random(n) < 0.5, np.nan, rng.standard_normal(n)),
    "+inf": lambda rng, n: np.where(rng.random(n) < 0.1, np.inf, rng.standard_normal(n)),
    "one huge": lambda rng, n: np.where(np.arange(n) == 5, 1e38, rng.standard_normal(n) * 1e-30),
    "subnormal": lambda rng, n: rng.standard_normal(n) * 1e-39,
    "best at the end": lambda rng, n: rng.standard_normal(n) + 100 * (np.arange(n) > n - 700),
}


def expected(row, length, k):
    score = np.where(np.isnan(row), -np.inf, row)[:length]
    best = np.lexsort((np.arange(length), -score))[:k]
    best = np.sort(best[score[best] > -np.inf])
    return np.concatenate([best, np.full(k - len(best), -1)]).astype(np.int32)


def random_row(case, n, seed=0):
    return CASES[case](np.random.default_rng(seed), n).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_reference(case):
    rows = np.stack([random_row(case, 900, seed) for seed in range(4)])
    lengths = np.array([900, 899, 100, 0], np.int32)
    got = topk(jnp.asarray(rows), 64, jnp.asarray(lengths), implementation="reference")
    np.testing.assert_array_equal(got, [expected(r, n, 64) for r, n in zip(rows, lengths, strict=True)])


def test_row_shorter_than_k_and_empty():
    np.testing.assert_array_equal(topk(jnp.asarray([[3.0, -jnp.inf, 1.0]]), 5), [[0, 2, -1, -1, -1]])
    assert topk(jnp.zeros((0, 8)), 3).shape == (0, 3)
    np.testing.assert_array_equal(topk(jnp.zeros((2, 0)), 2), [[-1, -1]] * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(k=-1), "k = -1"),
        (dict(k=4, implementation="triton"), "triton"),
        (dict(k=2049, implementation="pallas"), "k = 2049"),
    ],
)
def test_impossible_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        topk(jnp.zeros((1, 1024)), **arguments)


def emulate(rows, lengths, k, blocks, threads, tile, parts, capacity):
    """The kernel's schedule on the emulator: one cluster takes all rows in turn."""
    u32 = np.uint32
    out = simt_emulator.Array(np.full(len(rows) * k, 12345, u32))
    sizes = dict(scores=capacity, indices=capacity, histogram=threads + 1, warps=64, counters=select.COUNTERS)
    garbage = np.random.default_rng(1)
    memory = [{n: garbage.integers(0, 2**32, s, dtype=u32) for n, s in sizes.items()} for _ in range(blocks)]

    final = capacity // blocks if blocks > 1 else k

    def program(m, rank):
        arrays = {n: simt_emulator.Array(a, [peer[n] for peer in memory]) for n, a in memory[rank].items()}
        buffer = select.Buffer(**arrays, capacity=capacity)
        select.initialise(m, buffer)
        slot = m.u32(0)
        for r, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            count, threshold = m.u32(0), m.f32(-math.inf)
            tiles = max(-(-length // tile), rank + 1)
            for t in range(rank, tiles, blocks):
                data = np.zeros(tile, np.float32)
                data[: max(0, len(row) - t * tile)] = row[t * tile : (t + 1) * tile]
                size = tile // parts

                def part(p, t=t, data=data, size=size):
                    start = p * u32(size) + m.tid * u32(4)
                    starts = range(0, size, 4 * threads)
                    scores = [x for s in starts for x in m.load4(simt_emulator.Array(data), start + u32(s))]
                    indices = [start + u32(t * tile + s + i) for s in starts for i in range(4)]
                    return scores, indices.__getitem__

                slot, count, threshold = select.append_large(
                    m, buffer, part, parts, u32(length), count, threshold, slot, k
                )
                limit, slack = (final, final - k) if t + blocks >= tiles else (capacity - size, k // 8)
                count, threshold = select.trim(m, buffer, count, threshold, m.u32(limit), m.u32(slack), k)
            select.finish(m, buffer, out, m.u32(r * k), m.u32(rank), blocks, count, k)

    simt_emulator.run_cluster(blocks, threads, program)
    return out.data.view(np.int32).reshape(len(rows), k)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("blocks", "threads", "tile", "parts", "capacity"),
    [(1, 512, 2048, 1, 4096), (4, 512, 8192, 2, 5120), (2, 1024, 16384, 2, 9216), (1, 512, 8192, 4, 3072)],
)
def test_per_thread_code(case, blocks, threads, tile, parts, capacity):
    n = 26_000
    lengths = [n, 300, n - 777]
    rows = [random_row(case, n, seed) for seed in range(3)]
    got = emulate(rows, lengths, 512, blocks, threads, tile, parts, capacity)
    np.testing.assert_array_equal(got, [expected(r, n, 512) for r, n in zip(rows, lengths, strict=True)])


@pytest.mark.parametrize("case", ["normal", "few values", "ascending"])
@pytest.mark.parametrize(("k", "blocks"), [(2047, 1), (2048, 2)])
def test_more_results_than_threads(case, k, blocks):
    rows, lengths = [random_row(case, 20_000, seed) for seed in range(2)], [20_000, 1_500]
    got = emulate(rows, lengths, k, blocks, 1024, 8192, 1, 16_384)
    np.testing.assert_array_equal(got, [expected(r, n, k) for r, n in zip(rows, lengths, strict=True)])


@settings(max_examples=20)
@given(st.data())
def test_per_thread_code_with_any_bits(data):
    k = data.draw(st.sampled_from([1, 7, 512]))
    length = data.draw(st.integers(0, 9000))
    values = data.draw(st.lists(st.floats(width=32), min_size=1, max_size=20))
    row = np.random.default_rng(data.draw(st.integers(0, 9))).choice(np.asarray(values, np.float32), 9000)
    np.testing.assert_array_equal(emulate([row], [length], k, 1, 512, 4096, 2, 3072)[0], expected(row, length, k))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [39_000, 50])
def test_two_rounds(monkeypatch, case, length):
    monkeypatch.setattr(kernel, "topk_pallas", lambda scores, lengths, k, tiling: topk_reference(scores, lengths, k))
    row = random_row(case, 40_000)
    got = kernel._in_two_rounds(jnp.asarray(row[None]), jnp.asarray([length], jnp.int32), 64)
    np.testing.assert_array_equal(got[0], expected(row, length, 64))


@pytest.mark.parametrize("change", [dict(capacity=8192), dict(stages=4), dict(parts=3), dict(capacity=9000)])
def test_impossible_tilings_are_refused(change):
    tiling = dataclasses.replace(kernel.default_tiling(64, 1 << 20), **change)
    with pytest.raises(ValueError, match="for k = 512"):
        kernel.topk_pallas(jnp.zeros((64, 1024)), jnp.full(64, 1024), 512, tiling)


@pytest.mark.parametrize("shape", arg_specs.SHAPES.values(), ids=arg_specs.SHAPES)
def test_lowers_for_cuda(shape):
    scores = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert "mosaic_gpu" in lowered_for_hopper(lambda s: topk(s, arg_specs.K), scores)


@needs_hopper
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [512, 2047])
@pytest.mark.parametrize("shape", [(3, 1000), (150, 5000), (8, 131072), (1, 600_000)])
def test_kernel_on_gpu(case, k, shape):
    rows = np.stack([random_row(case, shape[1], seed) for seed in range(shape[0])])
    lengths = np.where(np.arange(shape[0]) % 3 == 2, shape[1] // 3, shape[1]).astype(np.int32)
    got = topk(jnp.asarray(rows), k, jnp.asarray(lengths), implementation="pallas")
    np.testing.assert_array_equal(got, [expected(r, n, k) for r, n in zip(rows, lengths, strict=True)])
