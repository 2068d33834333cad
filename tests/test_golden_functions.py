"""Single functions against an independent implementation, at released constants, and the vectors of section 12."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from golden import DATA, NOQUANT, functions
from golden_impl import candidate_mask, ngrams

from dsv4jax import quant
from dsv4jax.batch import PrefillBucket, PrefillChunk, prefill_batch
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import DEAD, hash_constants, rows_on_device, rows_on_host
from dsv4jax.linear import linear_fp32
from dsv4jax.model.compressor import Compressor
from dsv4jax.model.engram import Engram
from dsv4jax.model.hyper_connections import Mix, collapse, expand, predict_mix, sinkhorn
from dsv4jax.model.layout import full_layout
from dsv4jax.model.moe import Router, sqrt_softplus
from dsv4jax.model.norm import rms_norm
from dsv4jax.model.rope import frequencies, rotate, rotation
from dsv4jax.weights import DenseWeight, Fp8Weight, Mxfp4Weight, dequantize
from pallas_kernels.moe_experts.reference import swiglu

RELEASED = ModelConfig()
TINY_B = ModelConfig.from_checkpoint(DATA / "tiny_b" / "checkpoint_quantized")
ROPES = {"plain": (RELEASED, False), "yarn": (RELEASED, True), "yarn_small": (TINY_B, True)}


def golden(key: str, dtype=None):
    """One array, as a JAX array."""
    return jnp.asarray(functions()[key], dtype)


def assert_close(got, key: str) -> None:
    """The README's tolerance for functions that round: rtol 1e-5, atol 2e-6."""
    np.testing.assert_allclose(np.asarray(got), functions()[key], rtol=1e-5, atol=2e-6, err_msg=key)


def assert_exact(got, key: str) -> None:
    """Bit for bit, signs of zeros included; NaN equals NaN."""
    got, want = np.asarray(got, np.float32), functions()[key].astype(np.float32)
    np.testing.assert_array_equal(got, want, err_msg=key)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number], err_msg=key)


def assert_one_step(got, key: str) -> None:
    """bf16 results at most one bf16 value apart."""
    assert got.dtype == jnp.bfloat16 and got.shape == functions()[key].shape
    got, want = np.asarray(got, np.float32), functions()[key]
    step = np.spacing(np.abs(want).astype(ml_dtypes.bfloat16)).astype(np.float32)
    assert np.all(np.abs(got - want) <= step), key


class TestRope:
    @pytest.mark.parametrize("name", ROPES)
    def test_frequencies_and_phases(self, name):
        """Frequencies are the reference's bit for bit: at position 10^6 one unit in the last place turns by 0.03."""
        cfg, compressed = ROPES[name]
        positions = golden(f"rope.{name}.positions")
        assert positions.max() == 1048575
        assert_exact(frequencies(cfg, compressed), f"rope.{name}.inv_freq")
        angles = np.asarray(positions, np.float32)[..., None] * frequencies(cfg, compressed)
        assert_exact(angles, f"rope.{name}.angles")
        by = rotation(cfg, positions, compressed)
        assert_close(by.cos, f"rope.{name}.cos")
        assert_close(by.sin, f"rope.{name}.sin")

    @pytest.mark.parametrize("name", ROPES)
    def test_rotation_of_the_last_channels(self, name):
        by = _rotation(name)
        x = golden(f"rope.{name}.x")
        assert_close(rotate(x, by), f"rope.{name}.y")
        assert_close(rotate(x, by.inverse()), f"rope.{name}.y_inv")
        assert_one_step(rotate(x.astype(jnp.bfloat16), by), f"rope.{name}.y_bf16")


def _rotation(name):
    """Phases of the golden positions, for [1, positions, heads, channels]."""
    cfg, compressed = ROPES[name]
    return rotation(cfg, golden(f"rope.{name}.positions")[..., None], compressed)


class TestCacheFormats:
    @pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])
    def test_quantise_and_back(self, name):
        qdq = getattr(quant, f"qdq_{name}")
        x = golden("cacheq.x")
        assert np.any((x == 0) & np.signbit(x)), "the data holds negative zeros"
        assert_exact(qdq(x), f"cacheq.{name}.y")
        assert_exact(qdq(golden("cacheq.x_bf16", jnp.bfloat16)), f"cacheq.{name}.y_bf16")
        assert_exact(qdq(x[:, :40]), f"cacheq.{name}.y_partial40")

    @pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])
    def test_records(self, name):
        """A packed record gives back the same values and holds the golden scales behind the elements."""
        pack, unpack = (getattr(quant, f"{way}_{name}") for way in ("pack", "unpack"))
        x = golden("cacheq.x")
        record = pack(x)
        assert record.shape[-1] == getattr(quant, f"record_bytes_{name}")(x.shape[-1])
        assert_exact(unpack(record, jnp.float32), f"cacheq.{name}.y")
        scale = np.asarray(record[:, -functions()[f"cacheq.{name}.scale"].shape[-1] :])
        decoded = scale.view(ml_dtypes.float8_e4m3fn) if name == "nvfp4" else quant.e8m0_decode(jnp.asarray(scale))
        assert_exact(decoded, f"cacheq.{name}.scale")


class TestCheckpointFormats:
    def test_fp8_with_partial_blocks(self):
        assert_exact(dequantize(_fp8("fp8", (32, 32)), jnp.float32), "ckpt.fp8.deq")

    def test_engram_rows(self):
        assert_exact(dequantize(_fp8("engram", (1, 32)), jnp.float32), "ckpt.engram.deq")

    def test_fp4(self):
        packed, scale = (golden(f"ckpt.fp4.{part}", jnp.uint8) for part in ("packed", "scale_bits"))
        # The reference decodes the code of -0 to +0 here.
        got = dequantize(Mxfp4Weight(packed, scale), jnp.float32)
        np.testing.assert_array_equal(got, functions()["ckpt.fp4.deq"])

    def test_every_code(self):
        codes = np.arange(256, dtype=np.uint8)
        one = jnp.full((1, 8), 127, jnp.uint8)
        e4m3 = Fp8Weight(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn))[None], one, (1, 32))
        assert_exact(dequantize(e4m3, jnp.float32)[0], "table.e4m3")
        assert_exact(quant.e8m0_decode(jnp.asarray(codes)), "table.e8m0")
        pairs = quant.e2m1_decode(jnp.asarray(codes)[:, None])
        assert_exact(pairs[:16, 0], "table.e2m1")
        assert_exact(pairs[::16, 1], "table.e2m1")


def _fp8(name, block):
    bits = functions()[f"ckpt.{name}.bits"].astype(np.uint8)
    return Fp8Weight(
        jnp.asarray(bits.view(ml_dtypes.float8_e4m3fn)), golden(f"ckpt.{name}.scale_bits", jnp.uint8), block
    )


@pytest.mark.parametrize("eps", ["1e-20", "1e-6"])
def test_rms_norm(eps):
    x, weight = golden("rmsnorm.x"), golden("rmsnorm.w")
    assert not np.asarray(x).any(-1).all(), "the data holds a row of zeros"
    assert_close(rms_norm(x, weight, float(eps)), f"rmsnorm.y_eps{eps}")


class TestHyperConnections:
    @pytest.mark.parametrize("iterations", [1, 2, 20])
    def test_sinkhorn(self, iterations):
        assert_close(sinkhorn(golden(f"sinkhorn.{iterations}.x"), iterations, 1e-6), f"sinkhorn.{iterations}.y")

    @pytest.mark.parametrize(("prefix", "dtype"), [("hc", jnp.float32), ("hc.bf16", jnp.bfloat16)])
    def test_mix_collapse_expand(self, prefix, dtype):
        streams, y = (golden(f"hc.{n}", dtype)[0] for n in ("x", "y"))
        mix = predict_mix(streams, golden("hc.fn"), golden("hc.base"), golden("hc.scale"), RELEASED)
        for got, name in ((mix.pre, "pre"), (mix.post, "post"), (mix.residual, "comb")):
            assert_close(got[None], f"{prefix}.{name}")
        golden_mix = Mix(*(golden(f"{prefix}.{n}")[0] for n in ("pre", "post", "comb")))
        close = assert_close if dtype == jnp.float32 else assert_one_step
        close(collapse(streams, golden("hc.pre_mix")[0])[None], f"{prefix}.collapse")
        close(expand(y, streams, golden_mix)[None], f"{prefix}.expand")


class TestCompressor:
    @pytest.mark.parametrize("case", ["r2_len9", "r2_len1", "r1_len5"])
    def test_latents(self, case):
        key, ratio = f"compressor.{case}", int(case[1])
        layer = 2 if ratio == 2 else 20
        module = Compressor(RELEASED, layer)
        module.wkv = nnx.Param(DenseWeight(golden(f"{key}.wkv")))
        if ratio == 2:
            module.wgate = nnx.Param(DenseWeight(golden(f"{key}.wgate")))
        module.norm.weight = nnx.Param(golden(f"{key}.norm"))
        # At ratio 1 the reference ran float32 in both cases.
        for dtype in (jnp.float32, jnp.bfloat16)[:ratio]:
            x = golden(f"{key}.x", dtype)[0]
            rings = tuple(jnp.zeros((1, 5, 2, module.norm.weight.shape[0])) for _ in range(3))
            latent, _ = module(x, _one_sequence(len(x)), rings, NOQUANT)
            closed = latent[ratio - 1 :: ratio][None]
            if dtype == jnp.float32:
                assert_close(closed, f"{key}.y")
            else:
                assert_one_step(closed, f"{key}.y_bf16")


def _one_sequence(length):
    """Layout of one sequence from position 0."""
    chunk = PrefillChunk(np.zeros(length, np.int32), 0, length, slot=0, pages=[0])
    bucket = PrefillBucket(tokens=length, requests=1, pages=1, tile=length)
    return full_layout(jax.tree.map(jnp.asarray, prefill_batch(RELEASED, CacheConfig(1, 1), [chunk], bucket)))


@pytest.mark.parametrize(("blocks", "size"), [(3, 4), (2, 5), (1, 4), (9, 3)])
def test_candidates(blocks, size):
    got = candidate_mask(functions()["cand.scores"], functions()["cand.visible"], blocks, size)
    np.testing.assert_array_equal(got, functions()[f"cand.k{blocks}_b{size}"])


class TestMoE:
    @pytest.mark.parametrize("limit", [10, 1])
    def test_swiglu(self, limit):
        gate, up = jnp.split(golden(f"swiglu.{limit}.gate_up"), 2, -1)
        assert_close(swiglu(gate, up, float(limit)) * golden(f"swiglu.{limit}.w"), f"swiglu.{limit}.y")

    def test_sqrt_softplus(self):
        assert_close(sqrt_softplus(golden("sqrtsoftplus.x")), "sqrtsoftplus.y")

    @pytest.mark.parametrize("tokens", ["text", "mixed"])
    def test_router(self, tokens):
        image = golden("gate.vision_types") >= 0
        assert np.any(image) and not np.all(image)
        router = make_router()
        assert_close(sqrt_softplus(linear_fp32(golden("gate.x"), router.weight[...])), "gate.scores")
        indices, weights = router(golden("gate.x"), image if tokens == "mixed" else jnp.zeros_like(image), 3, 1.5)
        np.testing.assert_array_equal(indices, functions()[f"gate.{tokens}.idx"])
        assert_close(weights, f"gate.{tokens}.w")


def make_router() -> Router:
    """The golden router: 12 experts."""
    router = Router(12, RELEASED)
    for name in ("weight", "bias", "bias_vl"):
        setattr(router, name, nnx.Param(golden(f"gate.{name}")))
    return router


def make_engram() -> Engram:
    """The golden Engram: 4 streams of 16 channels, a table of 50 rows."""
    module = Engram(ModelConfig(quantized=False), 0, True)
    for name in ("embed", "wkv"):
        setattr(module, name, nnx.Param(DenseWeight(golden(f"engram.{name}"))))
    for name in ("q_weight", "k_weight"):
        setattr(module, name, nnx.Param(golden(f"engram.{name}")))
    return module


@pytest.mark.parametrize("masked", [False, True])
def test_engram(masked):
    module, streams = make_engram(), golden("engram.x")[0]
    rows = module.lookup(golden("engram.rows")[0], jnp.float32)
    active = golden("engram.mask")[0] if masked else jnp.ones(len(streams), bool)
    key = "engram.y_masked" if masked else "engram.y"
    assert_close(module(streams, rows, active, NOQUANT)[None], key)


class TestReleasedHash:
    real = np.load(DATA / "functions" / "engram_real.npz")

    def test_constants(self):
        constants = hash_constants(RELEASED)
        for name in ("primes", "offsets", "multipliers"):
            np.testing.assert_array_equal([getattr(c, name) for c in constants], self.real[name])
        assert [sum(c.primes) for c in constants] == list(RELEASED.engram_num_embeddings)
        assert list(self.real["row_totals"]) == list(RELEASED.engram_num_embeddings)

    @pytest.mark.parametrize("rows", ["rows", "rows_masked"])
    def test_rows_on_host_and_device(self, rows):
        pad = int(self.real["pad_id_compressed"])
        ids = self.real["compressed_ids"]
        if rows == "rows_masked":
            ids = np.where(self.real["mask"], ids, DEAD)
        for sequence, want in zip(ids, self.real[rows], strict=True):
            history = ngrams(sequence, 4)
            np.testing.assert_array_equal(rows_on_host(RELEASED, history, pad), want)
            np.testing.assert_array_equal(rows_on_device(RELEASED, jnp.asarray(history), jnp.int32(pad)), want)


class TestVectorsOfSection12:
    ROWS = (
        "15549121 16178507 43943392 58488443 73729315 89855913 97990380 115673586 131187499 152741863 164154468"
        " 176291809 204149706 216407964 226706836 253725597 256855057 283876358 298799997 315843517 333125074"
        " 351925824 362144355 376572428",
        "5298743 17712081 36129568 59269676 70898166 80115406 111956423 121059875 135632518 157432677 171137657"
        " 185545265 207247213 219781161 238060699 244021372 269729600 282090245 297535010 305716049 327729877"
        " 337107606 359063324 374398490",
    )

    def test_engram_rows(self):
        history = np.int32([[5000, 1234, 98765, 42]])
        want = np.int64([[row.split() for row in self.ROWS]])
        np.testing.assert_array_equal(rows_on_host(RELEASED, history, 2), want)
        np.testing.assert_array_equal(rows_on_device(RELEASED, jnp.asarray(history), jnp.int32(2)), want)
        assert [c.offsets[-1] for c in hash_constants(RELEASED)] == [368005705, 368015793]

    def test_sinkhorn(self):
        logits = jnp.array([[1, 0, -1, 2], [0.5, 0.25, 0, -0.5], [3, 2, 1, 0], [-1, -2, 0, 1]], jnp.float32)
        want = [
            [0.235898, 0.188070, 0.074576, 0.501455],
            [0.227673, 0.384261, 0.322566, 0.065499],
            [0.464615, 0.370414, 0.146879, 0.018090],
            [0.071813, 0.057254, 0.455978, 0.414955],
        ]
        np.testing.assert_allclose(sinkhorn(logits, 20, 1e-6), want, atol=6e-7)

    def test_yarn_frequencies(self):
        pairs = [0, 15, 16, 20, 24, 25, 31]
        want = [1, 3.635538584e-3, 2.265625e-3, 2.969777783e-4, 1.953125e-5, 5.372312671e-6, 5.680529037e-7]
        np.testing.assert_allclose(frequencies(RELEASED, True)[pairs], want, rtol=3e-7)

    @pytest.mark.parametrize(
        ("name", "amax", "exponent"),
        [("fp8", 1.0, -8), ("fp8", 3.7, -6), ("fp8", 448, 0), ("fp8", 449, 1), ("fp8", 1e-4, -22), ("fp8", 0, -22),
         ("mxfp4", 1.0, -2), ("mxfp4", 3.7, 0), ("mxfp4", 448, 7)],
    )  # fmt: skip
    def test_scales(self, name, amax, exponent):
        record = getattr(quant, f"pack_{name}")(jnp.zeros(32).at[5].set(-amax))
        assert int(record[-1]) - 127 == exponent
