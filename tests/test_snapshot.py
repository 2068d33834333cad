"""Orbax snapshots: bit-exact both ways and across meshes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import DATA, SINGLE, golden_copy, run_python

from dsv4jax.checkpoint.load import load_params
from dsv4jax.checkpoint.random import random_tensor
from dsv4jax.checkpoint.safetensors import SafetensorsReader, write_checkpoint
from dsv4jax.checkpoint.snapshot import checkpoint_to_snapshot, load_snapshot, save_snapshot, snapshot_to_checkpoint
from dsv4jax.config import ModelConfig
from dsv4jax.params import checkpoint_inventory, named_leaves

ROOT = Path(__file__).parent.parent


def same(a, b):
    b = dict(b)
    return all(np.asarray(leaf).tobytes() == np.asarray(b.pop(name)).tobytes() for name, leaf in a) and not b


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Random weights in exactly the declared types, in several files."""
    source = DATA / "tiny_a/checkpoint_quantized"
    cfg = ModelConfig.from_checkpoint(source)
    plan = checkpoint_inventory(cfg)
    directory = tmp_path_factory.mktemp("snapshot") / "checkpoint"
    files = {name: (source / name).read_bytes() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")}
    tensors = ((name, random_tensor(name, cfg, 3)) for name in plan)
    write_checkpoint(directory, plan, tensors, shard_bytes=1 << 20, files=files)
    return directory


@pytest.fixture(scope="module")
def cfg(checkpoint):
    return ModelConfig.from_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def snapshot(checkpoint):
    path = checkpoint.with_name("snapshot of the checkpoint")
    subprocess.run(
        [sys.executable, ROOT / "scripts/convert.py", "--input", checkpoint, "--output", path],
        check=True, cwd=checkpoint.parent, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    return path


def test_snapshot_holds_the_parameters_of_the_checkpoint(checkpoint, snapshot, cfg):
    loaded = load_params(checkpoint, cfg, progress=False)
    restored = load_snapshot(snapshot, cfg)
    assert same(named_leaves(restored), named_leaves(loaded))
    without = dict(named_leaves(load_snapshot(snapshot, cfg, tables_on_device=False)))
    assert same(without.items(), {n: x for n, x in named_leaves(loaded) if "engram.embed" not in n}.items())


def test_snapshot_converts_back_byte_for_byte(checkpoint, snapshot, tmp_path):
    snapshot_to_checkpoint(snapshot, tmp_path / "again", shard_bytes=1 << 20, progress=False)
    for file in checkpoint.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    snapshot_to_checkpoint(snapshot, tmp_path / "single", shard_bytes=1 << 30, progress=False)
    first, second = SafetensorsReader(checkpoint), SafetensorsReader(tmp_path / "single")
    assert (tmp_path / "single" / SINGLE).is_file() and list(first.tensors) == list(second.tensors)
    assert all(first.view(name).tobytes() == second.view(name).tobytes() for name in first.tensors)


def test_parameters_saved_from_one_mesh_are_restored_onto_others(tmp_path):
    """Experts and tables over 8 devices, then 2, then 1; experts of the golden model changed to divide by 8."""
    source = DATA / "tiny_a/checkpoint_quantized"
    changes = {"dspark_n_routed_experts": 8}
    cfg = replace(ModelConfig.from_checkpoint(source), **changes)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/config.json").write_text(json.dumps(cfg.to_dict()))
    (tmp_path / "files/tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    run_python(
        """
import sys, warnings
import numpy as np
warnings.simplefilter("error", DeprecationWarning)
from dsv4jax.checkpoint.random import random_params
from dsv4jax.checkpoint.snapshot import load_snapshot, save_snapshot
from dsv4jax.config import ModelConfig
from dsv4jax.params import named_leaves
from sharding import prefill_dep
directory = sys.argv[1]
cfg = ModelConfig.from_checkpoint(directory + "/files")
saved = random_params(cfg, 5, prefill_dep(8))
save_snapshot(directory + "/snapshot", named_leaves(saved), directory + "/files")
expected = {name: np.asarray(leaf) for name, leaf in named_leaves(random_params(cfg, 5))}
for devices in (2, 1):
    restored = dict(named_leaves(load_snapshot(directory + "/snapshot", cfg, prefill_dep(devices))))
    assert restored.keys() == expected.keys()
    for name, leaf in restored.items():
        found, rows = np.asarray(leaf), expected[name].shape[0]
        assert found[:rows].tobytes() == expected[name].tobytes() and not found[rows:].any(), name
    w1 = restored["layers.3.ffn.experts.*.w1.weight"]
    assert w1.sharding.mesh.size == devices and w1.addressable_shards[0].data.shape[0] == 8 // devices
""",
        tmp_path,
        devices=8,
    )


def test_snapshot_that_does_not_fit_is_refused(snapshot, cfg):
    with pytest.raises(ValueError, match=r"'layers\.0\.ffn\.experts\.\*\.w1\.scale' is uint8 \[8, 32, 2\], expected"):
        load_snapshot(snapshot, replace(cfg, n_routed_experts=9))
    with pytest.raises(ValueError, match=r"'layers\.0\.attn\.wkv\.scale' is not a leaf of the model"):
        load_snapshot(snapshot, replace(cfg, quantized=False))


def test_what_is_not_a_snapshot_is_refused(checkpoint, cfg, tmp_path):
    with pytest.raises(FileNotFoundError, match="no snapshot in"):
        load_snapshot(checkpoint, cfg)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        save_snapshot(tmp_path / "x", [], tmp_path)


def test_failed_conversion_leaves_nothing(snapshot, tmp_path):
    bad = golden_copy(tmp_path / "bad")
    file = bad / SINGLE
    content = bytearray(file.read_bytes())
    position = 8 + int.from_bytes(content[:8], "little")
    content[position:] = b"\xff" * (len(content) - position)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"NaN|no BF16 form"):
        checkpoint_to_snapshot(bad, tmp_path / "x", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
    with pytest.raises(FileExistsError, match="exists"):
        checkpoint_to_snapshot(bad, snapshot, progress=False)
