"""Parameters for the kernels, and whether these can run."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import run_python
from hopper import needs_no_hopper, on_hopper

import dsv4jax
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.config import ModelConfig
from dsv4jax.implementation import with_implementation
from dsv4jax.numerics import FAST, REFERENCE
from dsv4jax.packing import pack_params
from dsv4jax.weights import DenseWeight, Fp8Weight, Mxfp4Weight
from pallas_kernels.moe_experts import unpack_experts

RELEASED = reduced_config(6, n_routed_experts=48, engram_vocab_size=1000, dspark_n_routed_experts=8)


def random_layer(seed: int, scale: int = 120):
    """What `pack_params` reads of a layer; `scale` is the largest scale byte of `wo_a`."""
    rng = np.random.default_rng(seed)

    def stack():
        codes, scales = rng.integers(0, 256, (2, 256, 128), np.uint8), rng.integers(100, 140, (2, 256, 8), np.uint8)
        return Mxfp4Weight(jnp.asarray(codes), jnp.asarray(scales))

    scales = rng.integers(90, scale, (8, 8)).astype(np.uint8)
    scales[3, 5] = scale
    return {
        "attn": {"wo_a": Fp8Weight(jnp.zeros((256, 256), jnp.float8_e4m3fn), jnp.asarray(scales))},
        "ffn": {"experts": {name: stack() for name in ("w1", "w2", "w3")}, "gate": jnp.ones(3)},
        "hc_attn_fn": jnp.ones((24, 1024)),
        "hc_ffn_fn": jnp.ones((24, 1024)),
    }


def test_packing_consumes_the_stacks_and_keeps_their_values():
    params = {"layers": {0: random_layer(0, 134), 1: random_layer(1)}, "mtp": {0: random_layer(2)}, "norm": jnp.ones(4)}
    before = jax.tree.map(np.asarray, params)
    packed = pack_params(params)
    assert packed["norm"] is params["norm"]
    for stack, i in (("layers", 0), ("layers", 1), ("mtp", 0)):
        old, new = before[stack][i]["ffn"]["experts"], packed[stack][i]["ffn"]["experts"]["packed"]
        unpacked = dict(zip(("w1", "w3", "w2"), unpack_experts(new), strict=True))
        assert jax.tree.all(jax.tree.map(np.array_equal, {name: unpacked[name] for name in old}, old))
        assert all(array.is_deleted() for array in jax.tree.leaves(params[stack][i]["ffn"]["experts"]))
        assert packed[stack][i]["ffn"]["gate"] is params[stack][i]["ffn"]["gate"]


def test_each_device_packs_its_own_experts():
    run_python(
        """
import jax, numpy as np
from test_packing import RELEASED, random_layer
from dsv4jax.numerics import Numerics
from dsv4jax.packing import pack_params, param_shapes
from sharding import decode_dep
layout, whole = decode_dep(2), random_layer(0)
spread = jax.device_put(whole, jax.NamedSharding(layout.mesh, jax.P()))
stacks = jax.device_put(whole["ffn"]["experts"], jax.NamedSharding(layout.mesh, jax.P("rank")))
spread["ffn"]["experts"] = stacks
whole, spread = (pack_params({"layers": {0: layer}, "mtp": {}}, at)
                 for layer, at in ((whole, layout.__class__()), (spread, layout)))
for one, both in zip(*map(jax.tree.leaves, (whole, spread)), strict=True):
    assert np.asarray(both).tobytes() == np.asarray(one).tobytes()
records = spread["layers"][0]["ffn"]["experts"]["packed"].w13.records
assert [shard.data.shape[0] for shard in records.addressable_shards] == [1, 1]
shape = param_shapes(RELEASED, Numerics(implementation="pallas"), layout)
for layer in (shape["layers"][5], shape["mtp"][0]):
    records = layer["ffn"]["experts"]["packed"].w13.records
    assert records.sharding == spread["layers"][0]["ffn"]["experts"]["packed"].w13.records.sharding
""",
        devices=2,
    )


def test_a_scale_that_the_grouped_kernel_multiplies_wrongly_is_refused_by_name_before_anything_is_consumed():
    params = {"layers": {0: random_layer(0), 1: random_layer(1, 135)}, "mtp": {}}
    with pytest.raises(ValueError, match=r"layers\.1\.attn\.wo_a\.scale: holds the byte 135, a scale of 2\^8;.* 134"):
        pack_params(params)
    assert not any(array.is_deleted() for array in jax.tree.leaves(params))


def test_experts_that_are_not_fp4_are_refused_by_name():
    layer = random_layer(0)
    layer["ffn"]["experts"] = {name: DenseWeight(jnp.zeros((2, 256, 256))) for name in ("w1", "w2", "w3")}
    with pytest.raises(ValueError, match=r"mtp\.1\.ffn\.experts: DenseWeight, the kernels take Mxfp4Weight"):
        pack_params({"layers": {}, "mtp": {1: layer}})


@needs_no_hopper
def test_without_a_hopper_gpu_the_default_is_plain_jax_and_asking_for_kernels_an_error():
    assert with_implementation(FAST, "reference", RELEASED) == (FAST, None)
    numerics, why = with_implementation(FAST, None, RELEASED)
    assert numerics == FAST and "must be a Hopper GPU" in why
    with pytest.raises(ValueError, match=r'^implementation = "pallas": the device is cpu: must be a Hopper GPU$'):
        with_implementation(REFERENCE, "pallas", RELEASED)
    with pytest.raises(ValueError, match='implementation = \'triton\': must be "reference", "pallas" or None'):
        with_implementation(REFERENCE, "triton", RELEASED)


def test_on_a_hopper_gpu_the_default_follows_what_the_kernels_take():
    embedded = ModelConfig.from_checkpoint(Path(dsv4jax.__file__).parent / "default_model")
    with on_hopper():
        numerics, why = with_implementation(FAST, None, RELEASED)
        assert (numerics.implementation, numerics.fast, why) == ("pallas", True, None)
        assert with_implementation(REFERENCE, "reference", RELEASED) == (REFERENCE, None)
        numerics, why = with_implementation(REFERENCE, None, embedded)
        assert numerics == REFERENCE and "multiples of 64 outputs and 256 inputs" in why
        with pytest.raises(ValueError, match=r'^implementation = "pallas": 12 entries per page, the kernel takes'):
            with_implementation(REFERENCE, "pallas", RELEASED, page_size=24)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"candidate_block_size": 16}, "publish = 2048 of block_size = 16, the kernel takes up to 2049 of 8"),
        ({"candidate_topk_blocks": 2050}, "publish = 2050 of block_size = 8, the kernel takes up to 2049 of 8"),
        ({"index_topk": 2049}, "k = 2049, the kernel takes 1 to 2048"),
        ({"sliding_window": 64}, "the window is 64: must be 128"),
    ],
)
def test_what_only_a_long_context_would_ask_of_the_kernels_is_known_at_the_start(change, why):
    with on_hopper():
        assert with_implementation(FAST, None, dataclasses.replace(RELEASED, **change)) == (FAST, why)
