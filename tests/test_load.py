"""Loading checkpoints: values, placement, refusals, memory."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import DATA, SINGLE, edit, golden_copy, parse, run_python, set_byte

from dsv4jax.checkpoint import memory, placement
from dsv4jax.checkpoint.engram_tables import HostEngramTables
from dsv4jax.checkpoint.load import load_params, stream_params
from dsv4jax.checkpoint.safetensors import SafetensorsReader
from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import DEAD
from dsv4jax.params import abstract_params, checkpoint_inventory, named_leaves
from dsv4jax.weights import DenseWeight, Fp8Weight, Mxfp4Weight, dequantize
from sharding.placement import initial_owners

WEIGHTS = (DenseWeight, Fp8Weight, Mxfp4Weight)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
EXPERT = "layers.3.ffn.experts.5.w2"
FP8 = "layers.4.attn.wq_a"


def load(path, **changes):
    cfg = replace(ModelConfig.from_checkpoint(path), **changes)
    return load_params(path, cfg, progress=False)


def values(weight):
    """What a weight stands for, by a decoder of its own."""
    if isinstance(weight, DenseWeight):
        return np.asarray(weight.weight, np.float64)
    elements, scale = np.asarray(weight.weight), np.exp2(np.asarray(weight.scale) - 127.0)
    if isinstance(weight, Mxfp4Weight):
        elements, block = np.take(E2M1, np.stack([elements & 15, elements >> 4], -1)), (1, 32)
        elements = elements.reshape(*elements.shape[:-2], -1)
    else:
        block = weight.block
    rows, columns = elements.shape[-2:]
    scale = np.repeat(np.repeat(scale, block[0], -2)[..., :rows, :], block[1], -1)[..., :columns]
    return elements.astype(np.float64) * scale


def decoded(params):
    """Name to values, quantised weights decoded."""
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, WEIGHTS))[0]
    return {jax.tree_util.keystr(path): values(x) if isinstance(x, WEIGHTS) else np.asarray(x) for path, x in leaves}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    directory = tmp_path_factory.mktemp("golden")
    return {
        (name, form): golden_copy(directory / name / form, name, form)
        for name, form in [
            ("tiny_a", "checkpoint_quantized"), ("tiny_a", "checkpoint"), ("tiny_b", "checkpoint_quantized")
        ]
    }  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    return golden_copy(tmp_path / "checkpoint")


def test_both_forms_have_the_same_values(golden):
    quantised = decoded(load(golden["tiny_a", "checkpoint_quantized"]))
    dense = decoded(load(golden["tiny_a", "checkpoint"]))
    assert quantised.keys() == dense.keys() and len(dense) > 300
    for name, expected in dense.items():
        # By value: the dense form was decoded with one zero, FP4 has two.
        assert np.array_equal(quantised[name], expected), name


@pytest.mark.parametrize("name", ["tiny_a", "tiny_b"])
def test_every_leaf_has_its_declared_shape_and_type(golden, name):
    path = golden[name, "checkpoint_quantized"]
    params = load(path)
    abstract = abstract_params(ModelConfig.from_checkpoint(path))
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    for (leaf_name, leaf), (_, spec) in zip(named_leaves(params), named_leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype), leaf_name


def test_nibbles_and_scales_arrive_as_the_format_says(golden):
    """Low nibble first, 2^(byte - 127) per 32 columns: file bytes against the model's own `dequantize`."""
    path = golden["tiny_a", "checkpoint_quantized"]
    header, data = parse(path / SINGLE)
    begin, end = header[f"{EXPERT}.weight"]["data_offsets"]
    rows, half = header[f"{EXPERT}.weight"]["shape"]
    scales = data[slice(*header[f"{EXPERT}.scale"]["data_offsets"])]
    expected = [E2M1[code] for byte in data[begin:end] for code in (byte & 15, byte >> 4)]
    expected = np.array(expected).reshape(rows, half // 16, 32) * np.exp2(np.array(scales) - 127.0).reshape(rows, -1, 1)
    stack = load(path)["layers"][3]["ffn"]["experts"]["w2"]
    assert np.array_equal(dequantize(stack, jnp.float32)[5], expected.reshape(rows, -1))


@pytest.mark.parametrize("byte", [0, 16, 119, 120, 127, 134, 254])
def test_scale_bytes_stay_exponents(checkpoint, byte):
    set_byte(checkpoint, f"{FP8}.scale", 0, byte)
    weight = load(checkpoint)["layers"][4]["attn"]["wq_a"]
    assert weight.scale.dtype == jnp.uint8 and weight.scale[0, 0] == byte
    if 0 < byte < 240:  # XLA takes fp32 subnormals, so the scale of byte 0, for zero; above, products overflow
        assert np.array_equal(np.asarray(dequantize(weight, jnp.float32)), values(weight).astype(np.float32))


@pytest.mark.parametrize(
    ("tensor", "position", "value", "message"),
    [
        (f"{FP8}.scale", 1, 255, rf"'{FP8}.scale': F8_E8M0 code of NaN at \[0, 1\]"),
        (f"{EXPERT}.scale", 7, 255, rf"'{EXPERT}.scale': F8_E8M0 code of NaN at \[7, 0\]"),
        (f"{FP8}.weight", 66, 0x7F, rf"'{FP8}.weight': F8_E4M3 code of NaN at \[1, 2\]"),
        ("layers.1.engram.embed.weight", 32 * 1361 + 3, 0xFF, r"embed.weight': F8_E4M3 code of NaN at \[1361, 3\]"),
    ],
)
def test_nan_codes_are_refused(checkpoint, tensor, position, value, message):
    set_byte(checkpoint, tensor, position, value)
    with pytest.raises(ValueError, match=message):
        load(checkpoint)


def test_f32_in_place_of_bf16_must_be_exact(checkpoint):
    header, data = parse(checkpoint / SINGLE)
    assert header["head.weight"]["dtype"] == "F32"
    begin, end = header["head.weight"]["data_offsets"]
    stored = np.frombuffer(data[begin:end], np.float32)
    loaded = load(checkpoint)["head"].weight
    assert loaded.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(loaded.astype(jnp.float32)).reshape(-1), stored)

    set_byte(checkpoint, "head.weight", 4 * (64 * 2 + 3), 1)
    with pytest.raises(ValueError, match=r"'head.weight': stored as F32 but declared BF16, and .* at \[2, 3\]"):
        load(checkpoint)


def test_bf16_in_place_of_f32_is_exact(checkpoint):
    def store_as_bf16(header, data):
        entry = header["layers.2.attn.attn_sink"]
        begin, end = entry["data_offsets"]
        entry["dtype"] = "BF16"
        for other in header.values():
            if "data_offsets" in other and other["data_offsets"][0] >= end:
                other["data_offsets"] = [offset - (end - begin) // 2 for offset in other["data_offsets"]]
        entry["data_offsets"] = [begin, (begin + end) // 2]
        words = np.frombuffer(bytes(data[begin:end]), np.uint16)[1::2]
        return data[:begin] + words.tobytes() + data[end:]

    header, data = parse(checkpoint / SINGLE)
    bits = np.frombuffer(data[slice(*header["layers.2.attn.attn_sink"]["data_offsets"])], np.uint32) & 0xFFFF0000
    edit(checkpoint, store_as_bf16)
    sink = load(checkpoint)["layers"][2]["attn"]["attn_sink"]
    assert sink.dtype == jnp.float32 and np.array_equal(np.asarray(sink).view(np.uint32), bits)


@pytest.mark.parametrize("name", ["tiny_a", "tiny_b"])
def test_token_map_comes_from_the_tokenizer(golden, name):
    token_map = np.asarray(load(golden[name, "checkpoint_quantized"])["engram_token_map"])
    expected = np.load(DATA / name / "engram_hash.npz")["token_map"]
    assert np.array_equal(token_map[: len(expected)], expected)
    assert len(token_map) > len(expected) and (token_map[len(expected) :] == DEAD).all()


def test_tokenizer_of_another_checkpoint_is_refused(checkpoint):
    shutil.copy(DATA / "tiny_b/checkpoint_quantized/tokenizer.json", checkpoint / "tokenizer.json")
    with pytest.raises(ValueError, match=r"compressed Engram ids but engram_compressed_vocab_size is 380"):
        load(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        load(checkpoint)


def test_everything_the_headers_tell_is_found_before_data_is_read(checkpoint, monkeypatch):
    def damage(header, data):
        header["mtp.1.ffn.shared_experts.w1.weigth"] = header.pop("mtp.1.ffn.shared_experts.w1.weight")
        header["layers.0.attn.wkv.scale"]["shape"] = [1, 4]
        header["layers.6.ffn.gate.bias"]["dtype"] = "I32"

    edit(checkpoint, damage)
    monkeypatch.setattr(SafetensorsReader, "view", lambda *_: pytest.fail("data was read"))
    with pytest.raises(ValueError) as error:
        load(checkpoint)
    message = str(error.value)
    assert "1 missing tensors: 'mtp.1.ffn.shared_experts.w1.weight'" in message
    assert "1 tensors the model does not have: 'mtp.1.ffn.shared_experts.w1.weigth' in 'model.safetensors'" in message
    assert "'layers.0.attn.wkv.scale' in 'model.safetensors' is [1, 4], expected [2, 2]" in message
    assert "'layers.6.ffn.gate.bias' in 'model.safetensors' is I32, expected F32" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantized": False}, r"tensors the model does not have: .*\.scale"),
        ({"n_routed_experts": 9}, r"missing tensors: 'layers\.0\.ffn\.experts\.8\.w1\.weight'"),
        ({"hidden_size": 96}, "tensors of wrong shape"),
    ],
)
def test_configuration_that_does_not_fit_is_refused(golden, changes, message):
    with pytest.raises(ValueError, match=message):
        load(golden["tiny_a", "checkpoint_quantized"], **changes)


def test_truncated_checkpoint_is_refused(checkpoint):
    file = checkpoint / SINGLE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated"):
        load(checkpoint)
    with pytest.raises(ValueError, match="truncated"):
        stream_params(checkpoint, ModelConfig.from_checkpoint(checkpoint))  # before the first leaf is asked for


def test_parameters_do_not_depend_on_the_files_any_more(checkpoint):
    params = load(checkpoint)
    before = decoded(params)
    file = checkpoint / SINGLE
    with open(file, "r+b") as f:
        f.write(b"\xff" * file.stat().st_size)
    for name, after in decoded(params).items():
        assert np.array_equal(after, before[name]), name


def test_stream_gives_the_leaves_of_load(golden):
    path = golden["tiny_a", "checkpoint_quantized"]
    cfg = ModelConfig.from_checkpoint(path)
    loaded = dict(named_leaves(load(path)))
    streamed = {name: leaf.copy() for name, leaf in stream_params(path, cfg)}
    assert list(streamed) == list(loaded)
    for name, leaf in streamed.items():
        assert leaf.tobytes() == np.asarray(loaded[name]).tobytes(), name
    without = [name for name, _ in stream_params(path, cfg, tables_on_device=False)]
    assert set(loaded) - set(without) == {f"layers.{i}.engram.embed.{k}" for i in (1, 5) for k in ("weight", "scale")}


def test_sharded_load_places_every_part(golden):
    run_python(
        """
import collections, sys, numpy as np, jax
from dsv4jax.checkpoint.load import CheckpointLeaves, load_params
from dsv4jax.config import ModelConfig
from dsv4jax.params import named_leaves
from sharding import Layout, ShardingRules, expert_parallel, make_mesh
from sharding.placement import initial_owners
path = sys.argv[1]
cfg = ModelConfig.from_checkpoint(path)
whole = dict(named_leaves(load_params(path, cfg, progress=False)))
for rules in (expert_parallel(), ShardingRules()):
    params = dict(named_leaves(load_params(path, cfg, Layout(make_mesh(2), rules), progress=False)))
    for name, leaf in params.items():
        assert len(leaf.addressable_shards) == 2
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(whole[name])[shard.index].tobytes(), name
    split = {name for name, leaf in params.items() if not leaf.sharding.is_fully_replicated}
    assert not split if rules == ShardingRules() else {
        "layers.5.ffn.experts.*.w1.weight", "mtp.0.ffn.experts.*.w2.scale", "layers.1.engram.embed.weight"} <= split
# 1362 rows over 4 devices: two more rows, of zeros.
params = load_params(path, cfg, Layout(make_mesh(4), ShardingRules(engram_rows="rank")), progress=False)
table = params["layers"][1]["engram"]["embed"].weight
assert table.shape[0] == 1364 and {shard.data.shape[0] for shard in table.addressable_shards} == {341}
found = np.asarray(table)
assert found[:1362].tobytes() == np.asarray(whole["layers.1.engram.embed.weight"]).tobytes() and not found[1362:].any()
# Experts into slots, some into two; each device reads those of its slots, once.
layout, parts = Layout(make_mesh(4), expert_parallel()), collections.Counter()
read = CheckpointLeaves._part
def counted(leaves, tensor, spec, index):
    parts[tensor] += ".ffn.experts." in tensor
    return read(leaves, tensor, spec, index)
CheckpointLeaves._part = counted
sizes = {"layers": (cfg.num_hidden_layers, cfg.n_routed_experts, 3), "mtp": (3, cfg.dspark_n_routed_experts, 2)}
owners = {stack: initial_owners(layers, experts, 4, slots) for stack, (layers, experts, slots) in sizes.items()}
owners["layers"] = np.stack([np.roll(row, 3 * i)[[2, 1, 0, *range(3, 12)]] for i, row in enumerate(owners["layers"])])
params = dict(named_leaves(load_params(path, cfg, layout, owners=owners, progress=False)))
CheckpointLeaves._part = read
for name, leaf in params.items():
    expected = np.asarray(whole[name])
    if "*" in name:
        stack, layer, *_ = name.split(".")
        held = owners[stack][int(layer)]
        expected = expected[held]
        assert len(leaf) == len(held) > len(set(held)) and not leaf.sharding.is_fully_replicated, name
        assert {e: parts[name.replace("*", str(e))] for e in held} == collections.Counter(held.tolist()), name
    found = np.asarray(leaf)[: len(expected)] if expected.ndim else np.asarray(leaf)
    assert found.tobytes() == expected.tobytes(), name
try:
    load_params(path, cfg, layout, progress=False)
except ValueError as error:
    assert "mtp.0.ffn.experts.*.w1" in str(error) and "of size 6 does not divide over the 4" in str(error), error
else:
    raise AssertionError("uneven experts were accepted")
""",
        golden["tiny_a", "checkpoint_quantized"],
        devices=8,
    )


def test_owners_of_other_experts_or_layers_are_refused_before_a_file_is_read(tmp_path):
    cfg = ModelConfig.from_checkpoint(DATA / "tiny_a" / "checkpoint")
    layers, experts = cfg.num_hidden_layers, cfg.n_routed_experts
    refusals = {
        "those of 'layers' are for 1 layers, the model has": {"layers": initial_owners(1, experts, 1, experts)},
        "experts need at least": {"layers": initial_owners(layers, experts - 1, 1, experts - 1)},
        "'vision' has no experts, only 'layers' and 'mtp' have": {"vision": initial_owners(1, 1, 1, 1)},
    }
    for message, owners in refusals.items():
        with pytest.raises(ValueError, match=message):
            load_params(tmp_path, cfg, owners=owners)


@pytest.mark.parametrize("form", ["checkpoint_quantized", "checkpoint"])
def test_host_tables_give_the_rows_of_the_device_tables(golden, form):
    path = golden["tiny_a", form]
    cfg = ModelConfig.from_checkpoint(path)
    params = load(path)
    limits = np.array(cfg.engram_num_embeddings)[:, None]
    rows = np.random.default_rng(0).integers(0, limits, (7, 2, cfg.engram_hash_columns))
    rows[0], rows[1] = 0, limits - 1
    found = HostEngramTables(path, cfg).lookup(rows)
    for i, layer in enumerate(cfg.engram_layer_ids):
        table = params["layers"][layer]["engram"]["embed"]
        assert np.array_equal(values(found[i]), values(table)[rows[:, i]])
        assert type(found[i]) is type(table) and getattr(found[i], "block", None) == getattr(table, "block", None)
    none = HostEngramTables(path, cfg).lookup(rows[:0])
    assert none[1].weight.shape == (0, cfg.engram_hash_columns, cfg.engram_head_dim)


def test_host_tables_refuse_bad_rows(checkpoint):
    cfg = ModelConfig.from_checkpoint(checkpoint)
    tables = HostEngramTables(checkpoint, cfg)
    rows = np.zeros((3, 2, cfg.engram_hash_columns), np.int64)
    with pytest.raises(ValueError, match=r"rows has shape \(3, 1, 6\): expected \[tokens, 2, 6\]"):
        tables.lookup(rows[:, :1])
    for bad in (-1, 1362):
        rows[2, 0, 3] = bad
        with pytest.raises(ValueError, match=rf"row {bad} is outside 'layers.1.engram.embed.weight': .* 0 to 1361"):
            tables.lookup(rows)
    set_byte(checkpoint, "layers.5.engram.embed.scale", 77, 255)
    rows[2, 0, 3], rows[1, 1, 4] = 0, 77
    with pytest.raises(ValueError, match=r"'layers.5.engram.embed.scale': F8_E8M0 code of NaN at \[77, 0\]"):
        HostEngramTables(checkpoint, cfg).lookup(rows)


def test_load_that_does_not_fit_is_refused_before_it_starts(golden, monkeypatch):
    monkeypatch.setattr(placement, "available_host_memory", lambda: 1000)
    monkeypatch.setattr(SafetensorsReader, "view", lambda *_: pytest.fail("data was read"))
    with pytest.raises(ValueError, match=r"not enough memory: the host needs 0\.0\d GiB, 0\.00 GiB are free"):
        load(golden["tiny_a", "checkpoint_quantized"])


def test_available_memory_respects_control_groups(tmp_path):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    (proc / "self/cgroup").write_text("0::/outer/inner\n")
    group = cgroup / "outer/inner"
    group.mkdir(parents=True)
    assert memory.available_host_memory(proc, cgroup) == 4000 * 1024
    for directory, limit in ((group, "max"), (group.parent, "3000000")):
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text("2500000\n")
        (directory / "memory.stat").write_text("anon 1\nactive_file 400000\ninactive_file 100000\n")
    assert memory.available_host_memory(proc, cgroup) == 1_000_000
    assert memory.available_host_memory(tmp_path / "elsewhere", cgroup) is None


MEASURE = """
import sys, jax, jax.numpy as jnp
from dsv4jax.checkpoint.load import load_params, stream_params
from dsv4jax.config import ModelConfig
from dsv4jax.params import named_leaves, abstract_params

def high_water():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) * 1024

path, what = sys.argv[1:]
cfg = ModelConfig.from_checkpoint(path)
sizes = [spec.nbytes for _, spec in named_leaves(abstract_params(cfg))]
jnp.zeros(3).block_until_ready()
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")
before = high_water()
if what == "stream":
    assert sum(leaf.nbytes for _, leaf in stream_params(path, cfg)) == sum(sizes)
else:
    params = load_params(path, cfg, progress=False)
print(high_water() - before, sum(sizes), max(sizes))
"""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    """Several hundred megabytes of zeros, which take no room on the disk."""
    directory = golden_copy(tmp_path_factory.mktemp("large") / "checkpoint")
    cfg = replace(
        ModelConfig.from_checkpoint(directory), hidden_size=512, n_routed_experts=64, moe_intermediate_size=512
    )
    header, position = {}, 0
    for name, (shape, dtype, nbytes) in checkpoint_inventory(cfg).items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    raw = json.dumps(header).encode()
    with open(directory / SINGLE, "wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + position)
    (directory / "config.json").write_text(json.dumps(cfg.to_dict()))
    return directory


def test_streaming_holds_one_leaf(large_checkpoint):
    """All memory counts, mapped pages too: pages of the files are given back leaf by leaf."""
    grown, total, largest = map(int, run_python(MEASURE, large_checkpoint, "stream").split())
    assert total > 300e6
    assert grown < 3 * largest + 40e6 < total / 4


def test_loading_holds_the_model_and_the_leaves_in_flight(large_checkpoint):
    grown, total, largest = map(int, run_python(MEASURE, large_checkpoint, "load").split())
    assert total <= grown < total + 2 * placement.LEAVES_IN_FLIGHT * largest + 40e6 < 1.5 * total
