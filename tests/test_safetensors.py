"""Safetensors reader and writer: round trips, and every way in which a file can be wrong."""

import json
import math
import re

import numpy as np
import pytest
from checkpoint_files import SINGLE, build, parse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4jax.checkpoint.safetensors import INDEX_FILE, SafetensorsReader, write_checkpoint
from dsv4jax.params import TensorInfo
from dsv4jax.weights import STORED_DTYPES


def info(dtype, *shape):
    return TensorInfo(shape, dtype, math.prod(shape) * STORED_DTYPES[dtype].itemsize)


def values(tensor: TensorInfo, seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 256, tensor.nbytes, dtype=np.uint8)
    return raw.view(STORED_DTYPES[tensor.dtype]).reshape(tensor.shape)


def write(directory, plan, shard_bytes=1 << 30, files=None):
    write_checkpoint(
        directory,
        plan,
        ((name, values(tensor)) for name, tensor in plan.items()),
        shard_bytes=shard_bytes,
        files=files or {},
    )
    return directory


PLAN = {
    "a.weight": info("F8_E4M3", 4, 8),
    "a.scale": info("F8_E8M0", 1, 1),
    "b": info("BF16", 3, 2),
    "c": info("F32", 5),
}


@pytest.fixture
def single(tmp_path):
    return write(tmp_path / "single", PLAN)


@pytest.fixture
def sharded(tmp_path):
    return write(tmp_path / "sharded", PLAN, shard_bytes=33)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    plan=st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
        st.builds(
            lambda dtype, shape: info(dtype, *shape),
            st.sampled_from(sorted(STORED_DTYPES)),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        min_size=1,
        max_size=6,
    ),
    shard_bytes=st.integers(1, 200),
)
def test_round_trip(tmp_path_factory, plan, shard_bytes):
    directory = write(tmp_path_factory.mktemp("round") / "checkpoint", plan, shard_bytes)
    reader = SafetensorsReader(directory)
    reader.check(plan)
    assert reader.tensors.keys() == plan.keys()
    for name, tensor in plan.items():
        view = reader.view(name)
        assert view.dtype == STORED_DTYPES[tensor.dtype] and view.shape == tensor.shape
        assert view.tobytes() == values(tensor).tobytes()
        reader.release(name)
        assert view.tobytes() == values(tensor).tobytes()  # released pages come back
    for file in {tensor.file for tensor in reader.tensors.values()}:
        sizes = [t.info.nbytes for t in reader.tensors.values() if t.file == file]
        assert sum(sizes) <= shard_bytes or sum(size > 0 for size in sizes) == 1


def test_format(single):
    header, data = parse(single / SINGLE)
    assert header["a.weight"] == {"dtype": "F8_E4M3", "shape": [4, 8], "data_offsets": [0, 32]}
    assert header["b"] == {"dtype": "BF16", "shape": [3, 2], "data_offsets": [33, 45]}
    assert bytes(data[33:45]) == values(PLAN["b"]).tobytes()
    assert (single / SINGLE).stat().st_size % 8 == len(data) % 8  # the data begins at a multiple of 8
    assert not (single / INDEX_FILE).exists()


def test_index(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in PLAN.values())
    assert index["weight_map"] == {
        "a.weight": "model-00001-of-00002.safetensors",
        "a.scale": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }


@pytest.mark.parametrize("cut", [1, 60, 4096])
def test_truncated_file_is_refused_with_both_sizes(tmp_path, cut):
    directory = write(tmp_path / "x", {"first": info("F32", 16), "last": info("BF16", 64, 64)})
    file = directory / SINGLE
    size = file.stat().st_size
    with open(file, "r+b") as f:
        f.truncate(size - cut)
    with pytest.raises(ValueError, match=rf"{SINGLE}: truncated: {size - cut} bytes.* {size}; tensor 'last'"):
        SafetensorsReader(directory)


def test_longer_file_is_refused(single):
    with open(single / SINGLE, "ab") as f:
        f.write(b"\0")
    with pytest.raises(ValueError, match=r"bytes, but its header describes only"):
        SafetensorsReader(single)


def entry(begin, end, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(0, 4), "b": entry(0, 4)}, "tensor 'b' at bytes 0..4 overlaps"),
        ({"a": entry(4, 8), "b": entry(0, 8, shape=(2,))}, "tensor 'a' at bytes 4..8 overlaps"),
        ({"a": entry(4, 8)}, "tensor 'a' at bytes 4..8 leaves a gap"),
        ({"a": entry(0, 8)}, r"tensor 'a': F32 \[1\] takes 4 bytes"),
        ({"a": entry(4, 0)}, r"tensor 'a': F32 \[1\] takes 4 bytes"),
        ({"a": entry(0, 4, dtype="F16")}, "tensor 'a': type 'F16'; known are"),
        ({"a": entry(0, 4, shape=(-1,))}, "tensor 'a': .* must be non-negative integers"),
        ({"a": entry(0, 4, shape=(True,))}, "tensor 'a': .* must be non-negative integers"),
        ({"a": entry(0, 4.0)}, "tensor 'a': .* must be non-negative integers"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "tensor 'a': malformed header entry"),
        ({"a": 3}, "tensor 'a': malformed header entry"),
        ([], "the header is not a JSON object"),
        (b'{"a": 1, "a": 2}', "unreadable header: 'a' occurs twice"),
        (b"{", "unreadable header"),
        (b"\xff\xfe", "unreadable header"),
    ],
)
def test_bad_header_is_refused(tmp_path, header, message):
    build(tmp_path / SINGLE, header, bytes(8))
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / SINGLE)) + ".*" + message):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\1\0\0", (1 << 40).to_bytes(8, "little") + b"{}"])
def test_what_is_not_a_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(ValueError, match="truncated, or not a safetensors file"):
        SafetensorsReader(tmp_path)


def test_all_damaged_files_are_named(sharded):
    for i in (1, 2):
        file = sharded / f"model-0000{i}-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"(?s)model-00001-of-00002.*model-00002-of-00002"):
        SafetensorsReader(sharded)


def change_index(directory, **changes):
    index = json.loads((directory / INDEX_FILE).read_text())
    for name, value in changes.items():
        if name == "total_size":
            index["metadata"]["total_size"] = value
        elif value is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = value
    (directory / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"c": "model-00001-of-00002.safetensors"}, "lists tensor 'c' in 'model-00001.*, but it is in 'model-00002"),
        ({"c": None}, "does not list tensor 'c' of 'model-00002-of-00002.safetensors'"),
        ({"d": "model-00001-of-00002.safetensors"}, "lists tensor 'd' in 'model-00001.*, which does not have it"),
        ({"total_size": 3}, "total_size is 3, the tensors take 65 bytes"),
        ({"c": "../other.safetensors"}, "'../other.safetensors' is not the name of a file inside"),
        ({"c": "/etc/passwd"}, "'/etc/passwd' is not the name of a file inside"),
        ({"c": 5}, "5 is not the name of a file inside"),
        ({"c": ""}, "'' is not the name of a file inside"),
        ({"c": []}, "unreadable index"),
    ],
)
def test_index_that_disagrees_is_refused(sharded, changes, message):
    change_index(sharded, **changes)
    with pytest.raises(ValueError, match=message):
        SafetensorsReader(sharded)


def test_tensor_in_two_files_is_refused(sharded):
    second = sharded / "model-00002-of-00002.safetensors"
    header, data = parse(second)
    header["a.scale"] = entry(len(data), len(data) + 1, "F8_E8M0", (1, 1))
    build(second, header, data + b"\0")
    with pytest.raises(ValueError, match=r"tensor 'a\.scale' is in two files: 'model-00001.*' and 'model-00002"):
        SafetensorsReader(sharded)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"weight_map": {"a": "f", "a": "g"}}', b"\xff"])
def test_unreadable_index_is_refused(tmp_path, content):
    (tmp_path / INDEX_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"{INDEX_FILE}: unreadable index"):
        SafetensorsReader(tmp_path)


def test_missing_files(sharded, tmp_path):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names 'model-00002-of-00002\.safetensors', which is not there"):
        SafetensorsReader(sharded)
    with pytest.raises(FileNotFoundError, match="neither"):
        SafetensorsReader(tmp_path)


def test_only_indexed_files_are_read(sharded):
    (sharded / "extra model.safetensors").write_bytes(b"not a safetensors file")
    (sharded / SINGLE).write_bytes(b"neither")
    assert SafetensorsReader(sharded).tensors.keys() == PLAN.keys()


def test_odd_names_work(tmp_path):
    directory = write(tmp_path / "größe 模型 %41", {"名 前": info("F32", 2), "b": info("F32", 2)}, shard_bytes=8)
    odd = "shard #1 – é.safetensors"
    (directory / "model-00001-of-00002.safetensors").rename(directory / odd)
    change_index(directory, **{"名 前": odd})
    assert (SafetensorsReader(directory).view("名 前") == values(info("F32", 2))).all()


def test_check_lists_each_kind(single):
    expected = {
        "a.weight": info("F8_E4M3", 8, 4),
        "a.scale": info("F32", 1, 1),
        "b": info("F32", 3, 2),
        **{f"missing.{i}": info("BF16", 2) for i in range(12)},
    }
    with pytest.raises(ValueError) as error:
        SafetensorsReader(single).check(expected)
    message = str(error.value)
    assert "12 missing tensors: 'missing.0' (BF16 [2]);" in message and "'missing.9' (BF16 [2]); and 2 more" in message
    assert "1 tensors the model does not have: 'c' in 'model.safetensors'" in message
    assert "1 tensors of wrong shape: 'a.weight' in 'model.safetensors' is [4, 8], expected [8, 4]" in message
    assert "1 tensors of wrong type: 'a.scale' in 'model.safetensors' is F8_E8M0, expected F32" in message


def test_unaligned_tensor_is_readable(tmp_path):
    build(tmp_path / SINGLE, {"a": entry(0, 1, "I8"), "b": entry(1, 5)}, b"\7" + np.float32(1.5).tobytes())
    assert SafetensorsReader(tmp_path).view("b").tolist() == [1.5]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", np.zeros(2, np.float32))], "'b' is next in the plan, got None"),
        ([("b", np.zeros(2, np.float32))], "'a' is next in the plan, got 'b'"),
        ([("a", np.zeros(3, np.float32))], r"'a': float32 \[3\] given, planned F32 \[2\]"),
        ([("a", np.zeros(2, np.int32))], r"'a': int32 \[2\] given, planned F32 \[2\]"),
        ([(n, np.zeros(2, np.float32)) for n in "abc"], "'c' is not in the plan"),
    ],
)
def test_failed_write_leaves_nothing(tmp_path, tensors, message):
    plan = {"a": info("F32", 2), "b": info("F32", 2)}
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path / "x", plan, iter(tensors), shard_bytes=8, files={"config.json": b"{}"})
    assert list(tmp_path.iterdir()) == []


def test_existing_directory_is_not_overwritten(single):
    before = (single / SINGLE).read_bytes()
    with pytest.raises(FileExistsError, match="exists"):
        write(single, PLAN)
    assert (single / SINGLE).read_bytes() == before


def test_tensors_are_drawn_one_at_a_time(tmp_path):
    """The writer asks for a tensor only after the one before it is in the file."""
    plan = {"a": info("F32", 4096), "b": info("F32", 4096)}

    def tensors():
        yield "a", values(plan["a"])
        (file,) = tmp_path.glob(".x.partial-*/*.safetensors")
        assert file.stat().st_size > plan["a"].nbytes
        yield "b", values(plan["b"])

    write_checkpoint(tmp_path / "x", plan, tensors(), shard_bytes=1 << 20, files={})
