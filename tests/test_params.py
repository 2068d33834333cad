"""The parameter tree against the checkpoint tables of architecture sections 10 and 1.3, written out once more."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from dsv4jax.config import ModelConfig
from dsv4jax.params import abstract_params, checkpoint_inventory, named_leaves, tensor_names

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
LAYERS, DRAFTS = range(40), range(3)
KV_SOURCES, INDEX_SOURCES, ENGRAM_ROWS = (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36), {1: 384006168, 14: 384016682}


def fp8(name, out, inner):
    """An FP8 linear with its 32 × 32 scales."""
    return [
        (f"{name}.weight", "F8_E4M3", (out, inner)),
        (f"{name}.scale", "F8_E8M0", (math.ceil(out / 32), math.ceil(inner / 32))),
    ]


def every_layer(experts):
    """Tensors of one layer or draft stage."""
    yield from fp8("attn.wq_a", 1280, 5120)
    yield from fp8("attn.wq_b", 32768, 1280)
    yield from fp8("attn.wkv", 512, 5120)
    yield from fp8("attn.wo_a", 8192, 4096)
    yield from fp8("attn.wo_b", 5120, 8192)
    yield "attn.q_norm.weight", "BF16", (1280,)
    yield "attn.kv_norm.weight", "BF16", (512,)
    yield "attn.attn_sink", "F32", (64,)
    for site in ("attn", "ffn"):
        yield f"{site}_norm.weight", "BF16", (5120,)
        yield f"hc_{site}_fn", "F32", (24, 20480)
        yield f"hc_{site}_base", "F32", (24,)
        yield f"hc_{site}_scale", "F32", (3,)
    yield "ffn.gate.weight", "BF16", (experts, 5120)
    yield "ffn.gate.bias", "F32", (experts,)
    yield "ffn.gate.bias_vl", "F32", (experts,)
    for e in range(experts):
        for name in ("w1", "w3"):
            yield f"ffn.experts.{e}.{name}.weight", "I8", (2304, 2560)
            yield f"ffn.experts.{e}.{name}.scale", "F8_E8M0", (2304, 160)
        yield f"ffn.experts.{e}.w2.weight", "I8", (5120, 1152)
        yield f"ffn.experts.{e}.w2.scale", "F8_E8M0", (5120, 72)
    yield from fp8("ffn.shared_experts.w1", 2304, 5120)
    yield from fp8("ffn.shared_experts.w3", 2304, 5120)
    yield from fp8("ffn.shared_experts.w2", 5120, 2304)


def some_layers(layer):
    if layer in KV_SOURCES:
        yield "attn.compressor.wkv.weight", "BF16", (512, 5120)
        yield "attn.compressor.norm.weight", "BF16", (512,)
        yield "attn.indexer.wk.weight", "BF16", (128, 512)
        yield "attn.indexer.k_norm.weight", "BF16", (128,)
    if layer in (2, 8, 14):
        yield "attn.compressor.wgate.weight", "BF16", (512, 5120)
    if layer in INDEX_SOURCES:
        yield from fp8("attn.indexer.wq_b", 4096, 1280)
        yield "attn.indexer.weights_proj.weight", "BF16", (32, 5120)
    if layer in ENGRAM_ROWS:
        yield "engram.embed.weight", "F8_E4M3", (ENGRAM_ROWS[layer], 256)
        yield "engram.embed.scale", "F8_E8M0", (ENGRAM_ROWS[layer], 8)
        yield from fp8("engram.wkv", 25600, 6144)
        yield "engram.q_weight", "BF16", (4, 5120)
        yield "engram.k_weight", "BF16", (4, 5120)


def drafts():
    yield from fp8("mtp.0.main_proj", 5120, 15360)
    yield "mtp.0.main_norm.weight", "BF16", (5120,)
    yield "mtp.2.norm.weight", "BF16", (5120,)
    yield "mtp.2.markov_head.embed.weight", "BF16", (129280, 256)
    yield "mtp.2.markov_head.head.weight", "BF16", (129280, 256)
    yield "mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)


def outside_layers():
    yield "embed.weight", "BF16", (129280, 5120)
    yield "head.weight", "BF16", (129280, 5120)
    for name in ("norm.weight", "image_start", "image_end", "image_newline"):
        yield name, "BF16", (5120,)
    yield "vision.patch_embed.proj.weight", "BF16", (1024, 588)
    yield "vision.patch_embed.proj.bias", "BF16", (1024,)
    for i in range(32):
        block = f"vision.blocks.{i}"
        yield f"{block}.norm1.weight", "BF16", (1024,)
        yield f"{block}.norm2.weight", "BF16", (1024,)
        yield f"{block}.attn.wqkv.weight", "BF16", (3072, 1024)
        yield f"{block}.attn.wqkv.bias", "BF16", (3072,)
        yield f"{block}.attn.wo.weight", "BF16", (1024, 1024)
        yield f"{block}.attn.wo.bias", "BF16", (1024,)
        yield f"{block}.mlp.w1.weight", "BF16", (5632, 1024)
        yield f"{block}.mlp.w2.weight", "BF16", (1024, 2816)
    yield "vision.norm.weight", "BF16", (1024,)
    yield "aligner.w1.weight", "BF16", (5120, 9216)
    yield "aligner.w1.bias", "BF16", (5120,)
    yield "aligner.w2.weight", "BF16", (5120, 5120)
    yield "aligner.w2.bias", "BF16", (5120,)


def expected_inventory():
    """Name -> (shape, type), from the tables."""
    tensors = [*outside_layers(), *drafts()]
    for layer in LAYERS:
        tensors += [(f"layers.{layer}.{name}", *rest) for name, *rest in every_layer(384)]
        tensors += [(f"layers.{layer}.{name}", *rest) for name, *rest in some_layers(layer)]
    for stage in DRAFTS:
        tensors += [(f"mtp.{stage}.{name}", *rest) for name, *rest in every_layer(128)]
    expected = {name: (shape, dtype) for name, dtype, shape in tensors}
    assert len(expected) == len(tensors)
    return expected


@pytest.fixture(scope="module")
def inventory():
    return checkpoint_inventory(ModelConfig())


def test_names_shapes_and_types_are_those_of_the_tables(inventory):
    expected = expected_inventory()
    actual = {name: (info.shape, info.dtype) for name, info in inventory.items()}
    assert sorted(actual.keys() ^ expected.keys()) == []
    assert {n: actual[n] for n in actual if actual[n] != expected[n]} == {}


def test_bytes_follow_from_shape_and_type(inventory):
    wrong = {n: i for n, i in inventory.items() if i.nbytes != math.prod(i.shape) * BYTES[i.dtype]}
    assert wrong == {}


def test_totals(inventory):
    assert len(inventory) == 96085
    assert sum(info.nbytes for info in inventory.values()) == 510_286_023_000
    types = Counter(info.dtype for info in inventory.values())
    assert types == {"BF16": 520, "F32": 387, "F8_E4M3": 357, "I8": 47_232, "F8_E8M0": 47_589}


PER_LAYER = {
    **dict.fromkeys(LAYERS, 2334), **dict.fromkeys((24, 28, 32, 36), 2337), 20: 2341, **dict.fromkeys((2, 8, 14), 2342),
}  # fmt: skip


def test_tensors_per_shard(inventory):
    shards = Counter()
    for name in inventory:
        top, number, *rest = name.split(".") if name.startswith(("layers.", "mtp.")) else (name.split(".")[0], 0)
        shards[top, int(number), rest[:1] == ["engram"]] += 1
    assert {i: shards.pop(("layers", i, False)) for i in LAYERS} == PER_LAYER
    assert [shards.pop(("layers", i, True)) for i in ENGRAM_ROWS] == [6, 6]
    assert [shards.pop(("mtp", i, False)) for i in DRAFTS] == [801, 798, 802]
    assert shards == {("vision", 0, False): 259, ("aligner", 0, False): 4} | {
        (name, 0, False): 1 for name in ("embed", "head", "norm", "image_start", "image_end", "image_newline")
    }


# Section 1.3: part, names, parameters, stored bytes. The page counts the attention of the vision tower with that of the
# text layers.
PARTS = [
    ("routed experts", r"layers\.\d+\.ffn\.experts\..*", 543_581_798_400, 288_777_830_400),
    ("shared experts", r"layers\.\d+\.ffn\.shared_experts\..*", 1_415_577_600, 1_416_960_000),
    ("attention, compressor, indexer", r"(layers|vision\.blocks)\.\d+\.attn\..*", 5_260_913_664, 5_420_254_208),
    ("router", r"layers\.\d+\.ffn\.gate\..*", 78_673_920, 157_409_280),
    ("hyper-connections", r"layers\.\d+\.hc_.*", 39_323_760, 157_295_040),
    ("embedding", r"embed\.weight", 661_913_600, 1_323_827_200),
    ("head", r"head\.weight", 661_913_600, 1_323_827_200),
    ("norms, image vectors", r"layers\.\d+\.(attn|ffn)_norm\.weight|norm\.weight|image_\w+", 430_080, 860_160),
    ("vision", r"vision\.(?!blocks\.\d+\.attn\.).*", 277_493_760, 554_987_520),
    ("aligner", r"aligner\..*", 73_410_560, 146_821_120),
    ("Engram tables", r"layers\.\d+\.engram\.embed\..*", 196_613_849_600, 202_758_032_400),
    ("Engram rest", r"layers\.\d+\.engram\.(?!embed\.).*", 314_654_720, 315_043_840),
    ("draft experts", r"mtp\.\d\.ffn\.experts\..*", 13_589_544_960, 7_219_445_760),
    ("draft rest", r"mtp\.\d\.(?!ffn\.experts\.).*", 635_817_570, 713_428_872),
]


def parameters(info):
    """Weights behind one tensor: two per byte of packed FP4, none for scales."""
    return {"F8_E8M0": 0, "I8": 2}.get(info.dtype, 1) * math.prod(info.shape)


@pytest.mark.parametrize("pattern, weights, size", [row[1:] for row in PARTS], ids=[row[0] for row in PARTS])
def test_parameters_and_bytes_of_each_part(inventory, pattern, weights, size):
    part = [info for name, info in inventory.items() if re.fullmatch(pattern, name)]
    assert (sum(map(parameters, part)), sum(info.nbytes for info in part)) == (weights, size)


def test_the_parts_cover_the_checkpoint(inventory):
    assert sum(size for *_, size in PARTS) == sum(info.nbytes for info in inventory.values())
    assert sum(weights for *_, weights, _ in PARTS[:8]) == 551_700_544_624


def test_a_decoded_checkpoint_has_the_same_parameters_in_bf16_and_no_scales(inventory):
    decoded = checkpoint_inventory(ModelConfig(quantized=False))
    assert set(decoded) == {name for name, info in inventory.items() if info.dtype != "F8_E8M0"}
    for name, info in decoded.items():
        assert info.dtype == ("F32" if inventory[name].dtype == "F32" else "BF16")
        assert math.prod(info.shape) == parameters(inventory[name])


# The tree.


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("tables_on_device", [True, False])
def test_every_leaf_names_an_axis_for_each_dimension(quantized, tables_on_device):
    config = ModelConfig(quantized=quantized)
    leaves = dict(named_leaves(abstract_params(config, tables_on_device)))
    wrong = {n: s for n, s in leaves.items() if len(s.axes) != len(s.shape)}
    assert wrong == {}
    for name, spec in leaves.items():
        assert all(axis is None or isinstance(axis, str) for axis in spec.axes), name
        assert spec.axes[0] == "expert" if "experts.*" in name else "expert" not in spec.axes[1:], name
    tables = {n for n in leaves if "engram.embed" in n}
    assert len(tables) == (2 * (1 + quantized) if tables_on_device else 0)


def test_expert_stacks_are_one_leaf_each():
    leaves = dict(named_leaves(abstract_params(ModelConfig())))
    name = "layers.7.ffn.experts.*.w2.weight"
    assert leaves[name].shape == (384, 5120, 1152)
    assert tensor_names(name, leaves[name])[383] == "layers.7.ffn.experts.383.w2.weight"
    assert len(leaves) < 2500


def test_only_the_token_map_is_no_tensor_of_the_checkpoint(inventory):
    leaves = dict(named_leaves(abstract_params(ModelConfig())))
    assert {n: s.shape for n, s in leaves.items() if s.derived} == {"engram_token_map": (129280,)}
    assert "engram_token_map" not in inventory


def test_scales_share_the_axes_of_their_weight():
    leaves = dict(named_leaves(abstract_params(ModelConfig())))
    scales = [name for name, spec in leaves.items() if spec.stored == "F8_E8M0"]
    assert len(scales) > 300
    for name in scales:
        weight = leaves[name.removesuffix("scale") + "weight"]
        assert leaves[name].axes == weight.axes, name


@pytest.mark.parametrize("name", ["tiny_a", "tiny_b"])
def test_a_tiny_checkpoint_has_the_tensors_of_its_inventory(name):
    path = Path(__file__).parent / "data" / "golden" / name / "checkpoint_quantized"
    raw = (path / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    shapes = {n: tuple(h["shape"]) for n, h in header.items() if n != "__metadata__"}
    inventory = checkpoint_inventory(ModelConfig.from_checkpoint(path))
    assert {n: i.shape for n, i in inventory.items()} == shapes
    # This checkpoint keeps some BF16 tensors in F32; the quantised ones must be stored as declared.
    assert {
        n for n, i in inventory.items() if i.dtype != header[n]["dtype"] and i.dtype not in ("BF16", "F32")
    } == set()
