"""Random weights: layout, statistics, determinism; reduced configurations; the script that writes them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from bench_scripts import load_script
from checkpoint_files import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.checkpoint import random
from dsv4jax.checkpoint.load import load_params
from dsv4jax.checkpoint.random import random_leaf, random_params, random_tensor
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import hash_constants
from dsv4jax.params import abstract_params, checkpoint_inventory, named_leaves
from dsv4jax.tokenizer import Tokenizer
from dsv4jax.weights import STORED_DTYPES

ROOT = Path(__file__).parent.parent
SOURCE = DATA / "tiny_a/checkpoint_quantized"
TINY = ModelConfig.from_checkpoint(SOURCE)
WIDE = replace(TINY, hidden_size=512, moe_intermediate_size=256, q_lora_rank=288)
"""Wide enough for statistics; 288 columns, so that chunks do not end with the rows."""

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def decode(name, cfg, seed=0):
    """Elements and scale of a quantised weight, each per element, and the largest element of the format."""
    stored = random_tensor(f"{name}.weight", cfg, seed)
    scale = np.exp2(random_tensor(f"{name}.scale", cfg, seed) - 127.0)
    if stored.dtype == np.uint8:
        elements, largest, rows = E2M1[np.stack([stored & 15, stored >> 4], -1)].reshape(len(stored), -1), 6, 1
    else:
        elements, largest, rows = stored.astype(np.float32), 448, 1 if "engram.embed" in name else 32
    per_element = np.repeat(np.repeat(scale, rows, 0)[: len(elements)], 32, 1)[:, : elements.shape[1]]
    return elements, per_element, largest, rows


def test_every_tensor_has_its_layout_and_no_nan():
    for name, info in checkpoint_inventory(TINY).items():
        tensor = random_tensor(name, TINY, 0)
        assert (tensor.shape, tensor.dtype) == (info.shape, STORED_DTYPES[info.dtype]), name
        if info.dtype == "F8_E8M0":
            assert tensor.max() < 255, name
        elif info.dtype != "I8":
            assert np.isfinite(tensor.astype(np.float32)).all() and (tensor.astype(np.float32) != 0).any(), name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.3.ffn.experts.0.w1", 1.1 / 512**0.5),
        ("layers.3.ffn.experts.7.w2", 0.4 / 256**0.5),
        ("layers.3.attn.wq_b", 0.7 / 288**0.5),
        ("layers.3.attn.wo_b", 0.4 / 64**0.5),
        ("layers.3.ffn.shared_experts.w2", 0.4 / 256**0.5),
        ("layers.1.engram.wkv", 0.8 / 192**0.5),
        ("layers.1.engram.embed", 1.0),
    ],
)
def test_quantised_weights(name, expected):
    """Standard deviation as asked for, scales as a quantiser chooses them, and not all the same."""
    elements, scale, largest, rows = decode(name, WIDE)
    values = elements * scale
    assert abs(values.mean()) < 0.1 * expected
    assert 0.85 * expected < values.std() < 1.15 * expected
    blocks = np.abs(elements[: len(elements) // rows * rows]).reshape(-1, rows, elements.shape[1] // 32, 32)
    largest_used = blocks.max((1, 3))
    assert largest_used.max() <= largest and (largest_used >= largest / 2).all()
    assert len(np.unique(scale)) >= 3
    assert 0.45 < (elements > 0).sum() / (elements != 0).sum() < 0.55


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("embed.weight", 0, 1),
        ("head.weight", 0, 2 / 512**0.5),
        ("layers.0.attn_norm.weight", 1, 0.2),
        ("vision.blocks.0.norm1.weight", 1, 0.2),
        ("layers.1.engram.q_weight", 1, 0.2),
        ("layers.2.attn.compressor.wkv.weight", 0, 1.1 / 512**0.5),
        ("layers.0.ffn.gate.weight", 0, 1.5 / 512**0.5),
        ("layers.0.hc_attn_fn", 0, 1 / 2048**0.5),
        ("mtp.2.markov_head.embed.weight", 0, 1),
        ("mtp.2.markov_head.head.weight", 0, 1.1 / 32**0.5),
        ("vision.blocks.1.mlp.w2.weight", 0, 0.4 / 48**0.5),
        ("aligner.w2.weight", 0, 1.1 / 512**0.5),
        ("aligner.w1.bias", 0, 0.1),
    ],
)
def test_dense_weights(name, mean, std):
    tensor = random_tensor(name, WIDE, 0).astype(np.float32)
    tolerance = 4 * std / tensor.size**0.5
    assert abs(tensor.mean() - mean) < tolerance
    assert abs(tensor.std() - std) < max(tolerance, 0.01 * std)


@pytest.mark.parametrize(
    "name", ["attn.attn_sink", "ffn.gate.bias", "ffn.gate.bias_vl", "hc_ffn_base", "hc_attn_scale"]
)
def test_small_terms_are_not_zero(name):
    tensor = random_tensor(f"layers.2.{name}", TINY, 0)
    assert tensor.dtype == np.float32 and np.abs(tensor).min() > 1e-4 and len(np.unique(tensor)) == tensor.size


def test_values_depend_on_name_and_seed_alone(monkeypatch):
    names = [
        "layers.3.attn.wq_b.weight",
        "layers.3.attn.wq_b.scale",
        "layers.3.ffn.experts.1.w1.weight",
        "embed.weight",
    ]
    before = {name: random_tensor(name, WIDE, 4).tobytes() for name in names}
    assert random_tensor(names[0], WIDE, 5).tobytes() != before[names[0]]
    assert random_tensor(names[0].replace("3", "4"), WIDE, 4).tobytes() != before[names[0]]
    monkeypatch.setattr(random, "_CHUNK", 1 << 10)  # in other portions
    assert {name: random_tensor(name, WIDE, 4).tobytes() for name in names} == before


def test_parameters_are_those_of_the_tensors():
    params = dict(named_leaves(random_params(TINY, 7)))
    specs = dict(named_leaves(abstract_params(TINY)))
    assert params.keys() == specs.keys()
    for name, spec in specs.items():
        if not spec.derived:
            assert np.asarray(params[name]).tobytes() == random_leaf(name, spec, TINY, 7).tobytes(), name
    assert np.array_equal(params["engram_token_map"], np.arange(512) % TINY.engram_compressed_vocab_size)
    expert = random_tensor("mtp.1.ffn.experts.4.w3.weight", TINY, 7)
    assert np.array_equal(params["mtp.1.ffn.experts.*.w3.weight"][4], expert)

    token_map = np.zeros(512, np.int32)
    fewer = dict(named_leaves(random_params(TINY, 7, tables_on_device=False, token_map=token_map)))
    assert not fewer["engram_token_map"].any()
    assert params.keys() - fewer.keys() == {f"layers.{i}.engram.embed.{k}" for i in (1, 5) for k in ("weight", "scale")}
    with pytest.raises(ValueError, match=r"token_map has shape \(3,\): expected \[vocab_size\] = \[512\]"):
        random_params(TINY, 7, token_map=token_map[:3])


def test_script_writes_a_checkpoint_that_loads_to_random_params(tmp_path):
    subprocess.run(
        [
            sys.executable, ROOT / "scripts/make_checkpoint.py", "--config", SOURCE / "config.json", "--seed", "7",
            "--tokenizer", SOURCE / "tokenizer.json", "--shard_bytes", "500000", "--output", tmp_path / "out",
            "--engram_vocab_size", "100",
        ],
        check=True, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    cfg = ModelConfig.from_checkpoint(tmp_path / "out")
    assert cfg.engram_vocab_size == 100 and cfg.engram_num_embeddings < TINY.engram_num_embeddings
    assert replace(cfg, engram_vocab_size=200, engram_num_embeddings=TINY.engram_num_embeddings) == TINY
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    loaded = dict(named_leaves(load_params(tmp_path / "out", cfg, progress=False)))
    expected = named_leaves(random_params(cfg, 7, token_map=np.asarray(loaded["engram_token_map"])))
    assert all(np.asarray(leaf).tobytes() == np.asarray(loaded[name]).tobytes() for name, leaf in expected)


@pytest.fixture
def configuration():
    script, _ = load_script("make_checkpoint")
    return script.configuration


def test_script_flags(configuration, default_tokenizer, tmp_path):
    cfg = configuration("released", 8, 1000, default_tokenizer)
    assert cfg.num_hidden_layers == 8 and cfg.hidden_size == 5120
    assert cfg.engram_compressed_vocab_size < default_tokenizer.vocab_size < cfg.vocab_size
    assert cfg.engram_num_embeddings == (sum(hash_constants(cfg)[0].primes),)
    with pytest.raises(ValueError, match="--layers = 8 reduces the released configuration only"):
        configuration(str(SOURCE), 8, None, default_tokenizer)
    with pytest.raises(ValueError, match=r"the tokenizer has \d+ ids but vocab_size is 512"):
        configuration(str(SOURCE), None, None, default_tokenizer)
    content = json.loads((SOURCE / "config.json").read_text())
    content["pad_token_id"] = content["text_config"]["pad_token_id"] = 5
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="pad is id 2, but pad_token_id is 5"):
        configuration(str(tmp_path), None, None, Tokenizer.from_checkpoint(SOURCE))


def test_reduced_to_all_layers_is_the_released_model():
    assert reduced_config(40) == ModelConfig()


@settings(max_examples=35)
@given(layers=st.integers(6, 40))
def test_reduced_configurations_keep_every_kind_of_layer(layers):
    cfg = reduced_config(layers, n_routed_experts=16, engram_vocab_size=1000)
    kinds = {(cfg.mode(i), cfg.ratio(i)) for i in range(layers)}
    assert {("window", 0), ("full", 2), ("full", 1), ("reindex", 1), ("reuse", 1)} <= kinds
    assert ("reuse", 2) in kinds or layers < 8
    assert [i for i in range(layers) if cfg.mode(i) == "full" and cfg.ratio(i) == 1] == [cfg.candidate_source_layer_id]
    assert 1 in cfg.engram_layer_ids and cfg.engram_layer_ids[-1] < cfg.decoder_start
    assert cfg.dspark_target_layer_ids == tuple(range(layers - 3, layers))
    assert cfg.engram_num_embeddings == tuple(sum(c.primes) for c in hash_constants(cfg))
    assert ModelConfig.from_dict(cfg.to_dict()) == cfg


def test_reduced_configuration_refuses():
    for layers in (5, 41):
        with pytest.raises(ValueError, match=f"layers = {layers}: allowed are 6 to 40"):
            reduced_config(layers)
    with pytest.raises(ValueError, match="num_experts_per_tok"):
        reduced_config(8, n_routed_experts=4)
    assert reduced_config(8, engram_vocab_size=1000, engram_num_embeddings=(99999,)).engram_num_embeddings == (99999,)
