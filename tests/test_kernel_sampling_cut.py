"""`sampling_cut`: the reference, the kernel's per-thread code on an emulator, its lowering, and parity on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simt_emulator
from hopper import lowered_for_hopper, needs_hopper, needs_no_hopper
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.sampling_cut import cut, reference, sampling_cut, weights
from pallas_kernels.sampling_cut.arg_specs import ASKED, ROWS, VOCAB, limits

CASES = {
    "normal": lambda rng, n: rng.normal(size=n) * 3,
    "far from zero": lambda rng, n: rng.normal(size=n) + 1000,
    "constant": lambda rng, n: np.full(n, -1.5),
    "few values": lambda rng, n: rng.integers(-2, 2, n),
    "zeros of both signs": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "mostly -inf": lambda rng, n: np.where(rng.random(n) < 0.98, -np.inf, rng.normal(size=n)),
    "one allowed": lambda rng, n: np.where(np.arange(n) == n // 3, -4.0, -np.inf),
    "one huge": lambda rng, n: np.where(np.arange(n) == 5, 3e38, -rng.random(n) * 3e38),
    "close": lambda rng, n: 7 + rng.integers(0, 9, n) * 2.0**-21,
    "all but one far": lambda rng, n: np.where(np.arange(n) == 7, 0.0, -1000 - rng.integers(0, 99, n)),
    "ascending": lambda rng, n: np.arange(n) / n * 30,
}
LIMITS = [(0, 1.0), (1, 1.0), (20, 1.0), (10**6, 1.0)]
LIMITS += [(0, 0.95), (0, 1e-30), (0, 0.9999999), (20, 0.95), (7, 0.9999999), (300, 0.5), (0, 0.0)]
"""top_k and top_p."""


class Machine(simt_emulator.Machine):
    def number(self, x):
        return np.float32(x)

    def whole(self, x):
        return np.asarray(x).astype(np.uint32)

    def quotient(self, x, y):
        return x // np.maximum(y, np.uint32(1))


def emulated(threads, logits, best, scale, top_k, top_p):
    """What the kernel does, a block after the other; shared memory starts with anything."""
    rows, vocab = logits.shape
    flat, garbage = simt_emulator.Array(np.asarray(logits).reshape(-1)), np.random.default_rng(1)
    table = simt_emulator.Array(weights.TABLE)
    results = []
    for row in range(rows):
        m = Machine(threads)
        sizes = (cut.BINS, 64, 8, weights.TABLE.size)
        memory = [simt_emulator.Array(garbage.integers(0, 2**32, size, dtype=np.uint32)) for size in sizes]
        scratch = cut.Scratch(*memory)
        cut.initialise(m, scratch, table)
        of_row = cut.Row(flat, m.u32(row * vocab), vocab, m.f32(best[row]))
        with np.errstate(over="ignore", invalid="ignore"):
            last, last_id = cut.find_cut(m, of_row, scratch, m.f32(scale[row]), m.u32(top_k[row]), m.f32(top_p[row]))
        assert len({*last.tolist()}) == len({*last_id.tolist()}) == 1
        results.append((last[0], last_id[0]))
    last, last_id = zip(*results, strict=True)
    return jnp.asarray(last), jnp.asarray(last_id, jnp.int32)


def kept_by(logits, last, last_id):
    logits, last, last_id = np.asarray(logits), np.asarray(last)[:, None], np.asarray(last_id)[:, None]
    return (logits > last) | ((logits == last) & (np.arange(logits.shape[1]) <= last_id))


def arguments(logits, temperature, top_k, top_p):
    """Of `sampling_cut`, for rows with the same settings or one each."""
    logits = np.asarray(logits, np.float32)
    rows = len(logits)
    of_rows = (np.full(rows, a, t) for a, t in ((temperature, np.float32), (top_k, np.int32), (top_p, np.float32)))
    with np.errstate(invalid="ignore"):
        return jax.device_put((logits, logits.max(1), np.ones(rows, bool), *of_rows))


def both(monkeypatch, threads, *given):
    """Which tokens the reference and the emulated kernel keep."""
    by_reference = sampling_cut(*given, implementation="reference")
    with monkeypatch.context() as patch:
        patch.setattr(reference, "sampling_cut", lambda *a: emulated(threads, *map(np.asarray, a)))
        by_kernel = sampling_cut(*given, implementation="reference")
    return (kept_by(given[0], *found) for found in (by_reference, by_kernel))


def expected(logits, temperature, top_k, top_p):
    """One row's kept tokens in float64."""
    order = np.argsort(-logits, kind="stable")
    with np.errstate(over="ignore"):
        weight = np.exp((logits[order] - logits[order[0]]) / temperature)
    length = min(top_k or len(order), len(order))
    if top_p < 1:
        mass = np.cumsum(weight[:length]) / np.sum(weight[:length])
        length = min(length, np.searchsorted(mass, top_p) + 1)
    return np.sort(order[:length])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.95), (0, 0.3), (40, 1.0), (40, 0.8), (5000, 0.9)])
def test_the_reference_cuts_as_float64_does(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32) * 4
    given = arguments(logits, temperature, top_k, top_p)
    kept = kept_by(logits, *jax.jit(functools.partial(sampling_cut, implementation="reference"))(*given))
    for row, got in zip(np.float64(logits), kept, strict=True):
        want = expected(row, temperature, top_k, top_p)
        # Where probabilities are added up, tokens at the cut weigh a millionth.
        np.testing.assert_allclose(got.sum(), len(want), rtol=1e-5 if top_p < 1 else 0)
        np.testing.assert_array_equal(np.sort(np.argsort(-row, kind="stable")[: got.sum()]), np.flatnonzero(got))


def test_shortest_prefix_of_a_full_vocabulary_with_ties():
    vocab, required = VOCAB, [1, 50, 64640, 129279, 129280, 10**8]
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(size=(6, vocab)) * 2, 1).astype(np.float32)
    weight = np.ones((6, vocab), np.uint32)
    weight[5] = rng.integers(0, 10000, vocab)

    @jax.jit
    def kept(logits, weight, required):
        rank = reference.descending_rank(logits)
        return reference.in_prefix(rank, reference.shortest_prefix(rank, weight, required))

    inside = kept(logits, weight, np.array(required, np.uint32)[:, None])
    for row in range(6):
        order = np.argsort(-logits[row], kind="stable")
        length = np.searchsorted(np.cumsum(weight[row, order]), required[row]) + 1
        np.testing.assert_array_equal(np.flatnonzero(inside[row]), np.sort(order[:length]))


def test_weights_are_powers_of_two_of_the_distance():
    distance = np.linspace(0, weights.FARTHEST, 100_001).astype(np.uint32)
    got = weights.weight_of(distance, weights.TABLE.__getitem__)
    want = 2.0 ** (28 - distance / 2**weights.FRACTION)
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=1)
    assert np.all(np.diff(got.astype(np.int64)) <= 0) and got[0] == 2**28 and got[-1] == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("threads", "vocab", "temperature"), [(128, 3000, 1.0), (128, 2000, 1e-38), (1024, 20_004, 0.2)]
)
def test_per_thread_code(monkeypatch, case, threads, vocab, temperature):
    logits = np.stack([CASES[case](np.random.default_rng(seed), vocab) for seed in range(len(LIMITS))])
    want, got = both(monkeypatch, threads, *arguments(logits, temperature, *zip(*LIMITS, strict=True)))
    np.testing.assert_array_equal(got, want)
    assert want.any(1).all()


def test_per_thread_code_on_a_full_vocabulary(monkeypatch):
    rows = [np.random.default_rng(0).normal(size=VOCAB) * 3, np.zeros(VOCAB), np.linspace(-1, 0, VOCAB)]
    want, got = both(monkeypatch, 1024, *arguments(rows, 0.8, [20, 0, 0], [0.95, 0.5, 0.75]))
    np.testing.assert_array_equal(got, want)
    assert want[1].sum() == VOCAB / 2 and want[1, 0]


def test_a_share_that_is_no_whole_number_is_rounded_up(monkeypatch):
    """4096 equal tokens weigh 2^17 each: two of them are half a unit less than what is asked for."""
    want, got = both(monkeypatch, 128, *arguments(np.zeros((2, 4096)), 1.0, 0, np.array([2**18, 2**18 + 0.5]) / 2**29))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(want, np.arange(4096) < [[2], [3]])


def test_a_distance_at_the_border_of_two_bins_counts_once(monkeypatch):
    unit, near = np.float32(weights.UNIT), np.float32(cut.BINS / weights.UNIT)
    (border,) = {x for x in (near, np.nextafter(near, 0), np.nextafter(near, 1)) if x * unit == cut.BINS}
    logits = np.repeat(np.float32([[0, -7.5 / weights.UNIT, -border, -9]]), [5, 5, 5, 45], axis=1)
    want, got = both(monkeypatch, 128, *arguments(logits, 1.0, 8, 1.0))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(want[0], np.arange(60) < 8)


@settings(max_examples=20)
@given(st.data())
def test_per_thread_code_with_any_values(data):
    values = data.draw(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=20)
    )
    logits = np.random.default_rng(data.draw(st.integers(0, 9))).choice(np.float32([*values, -np.inf]), (1, 600))
    if np.isfinite(logits).any():
        limit = data.draw(st.integers(0, 700)), data.draw(st.floats(2.0**-20, 1, width=32))
        with pytest.MonkeyPatch.context() as patch:
            want, got = both(patch, 128, *arguments(logits, data.draw(st.floats(0.01, 100)), *limit))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("why", ["greedy", "nothing asked", "NaN", "+inf", "nothing allowed"])
def test_rows_without_a_cut_keep_everything(why):
    logits = np.random.default_rng(0).normal(size=(3, 64))
    if why in ("NaN", "+inf"):
        logits[1, 5] = np.float32(why.lower())
    elif why == "nothing allowed":
        logits[1] = -np.inf
    ours = np.arange(3) == 1
    top_k, top_p = (0, 1.0) if why == "nothing asked" else (3, 0.5)
    given = list(arguments(logits, 1.0, np.where(ours, top_k, 3), np.where(ours, top_p, 0.5)))
    given[2] = jnp.asarray(~ours | (why != "greedy"))
    last, last_id = sampling_cut(*given, implementation="reference")
    np.testing.assert_array_equal(last == -np.inf, ours)
    np.testing.assert_array_equal(last_id == 64, ours | (last_id == 64))


@pytest.mark.parametrize("rows", ROWS)
def test_lowers_for_cuda(rows):
    s = jax.ShapeDtypeStruct
    kinds = (jnp.float32, jnp.bool_, jnp.float32, jnp.int32, jnp.float32)
    run = functools.partial(sampling_cut, implementation="pallas")
    text = lowered_for_hopper(run, s((rows, VOCAB), jnp.float32), *(s((rows,), kind) for kind in kinds))
    assert text.count("custom_call @mosaic_gpu") == 1 and "stablehlo.while" not in text


def test_what_cannot_run_is_named():
    with pytest.raises(ValueError, match="a vocabulary of 131073"):
        sampling_cut(*arguments(np.zeros((1, 2**17 + 1)), 1.0, 1, 1.0), implementation="reference")
    with pytest.raises(ValueError, match="implementation = 'triton'"):
        sampling_cut(*arguments(np.zeros((1, 8)), 1.0, 1, 1.0), implementation="triton")
    with pytest.raises(ValueError, match='implementation = "pallas": a vocabulary of 9'):
        lowered_for_hopper(
            functools.partial(sampling_cut, implementation="pallas"), *arguments(np.zeros((1, 9)), 1.0, 1, 1.0)
        )


@needs_no_hopper
def test_a_kernel_without_its_device_is_refused():
    with pytest.raises(ValueError, match='implementation = "pallas": the device is'):
        sampling_cut(*arguments(np.zeros((1, 8)), 1.0, 1, 1.0), implementation="pallas")


def check_on_gpu(*given):
    run = jax.jit(sampling_cut, static_argnames="implementation")
    found = {name: kept_by(given[0], *run(*given, implementation=name)) for name in ("reference", "pallas")}
    np.testing.assert_array_equal(found["pallas"], found["reference"])


@needs_hopper
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vocab", [64, 20_004, VOCAB])
def test_kernel_on_gpu(case, vocab):
    logits = np.stack([CASES[case](np.random.default_rng(seed), vocab) for seed in range(len(LIMITS))])
    for temperature in (1.0, 0.2, 1e-38):
        check_on_gpu(*arguments(logits, temperature, *zip(*LIMITS, strict=True)))


@needs_hopper
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("asked", ASKED)
def test_kernel_on_gpu_at_the_sizes_of_a_step(rows, asked):
    logits = np.random.default_rng(rows).normal(size=(rows, VOCAB)) * 3
    check_on_gpu(*arguments(logits, np.linspace(0.1, 2, rows), *limits(rows, asked)))
