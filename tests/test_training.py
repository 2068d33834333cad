"""Training: what the model sees of its masters, the differentiable forward, steps, runs that are resumed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import small_model
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax import quant
from dsv4jax.checkpoint.load import compressed_ids, load_params
from dsv4jax.checkpoint.random import random_params
from dsv4jax.checkpoint.reduced_config import with_fitted_tables
from dsv4jax.linear import linear_fp32
from dsv4jax.model.indexer import candidate_blocks, select_top
from dsv4jax.model.transformer import merge
from dsv4jax.numerics import REFERENCE
from dsv4jax.params import named_leaves
from dsv4jax.steps import forward
from dsv4jax.tokenizer import engram_token_map
from dsv4jax.training import run as run_module
from dsv4jax.training.data import Mixture
from dsv4jax.training.draft import draft_losses
from dsv4jax.training.forward import training_forward
from dsv4jax.training.parameters import (
    export_checkpoint,
    init_masters,
    read_masters,
    rounded_params,
    stored_params,
    trained_spec,
    write_masters,
)
from dsv4jax.training.plan import DEFAULT_PLAN, Stage, default_config, learning_rate, read_plan, write_plan
from dsv4jax.training.run import RunConfig, train
from dsv4jax.training.selection import candidate_mask, top_mask
from dsv4jax.training.step import Optimisation, abstract_state, init_state, only_trained
from dsv4jax.weights import DenseWeight, Fp8Weight, Mxfp4Weight, RoundedWeight, dequantize

LENGTH, BATCH = 40, 4
OPTIMISATION = Optimisation(learning_rate=3e-3)


def tiny_config(tokenizer, **changes):
    """One layer with everything, and one draft stage, with the default tokenizer's vocabulary."""
    fields = dict(
        vocab_size=tokenizer.vocab_size,
        engram_compressed_vocab_size=int(engram_token_map(tokenizer).max()) + 1,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=1,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        compress_ratios=(1, 0),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=0,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=8,
        candidate_topk_blocks=3,
        candidate_block_size=8,
        hc_sinkhorn_iters=3,
        engram_layer_ids=(0,),
        engram_num_embeddings=(1 << 24,),
        engram_vocab_size=100,
        engram_n_heads=1,
        engram_head_dim=32,
        num_nextn_predict_layers=1,
        dspark_block_size=3,
        dspark_target_layer_ids=(0,),
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        dspark_markov_rank=16,
        dspark_noise_token_id=5,
        image_token_id=7,
    )
    return with_fitted_tables(dataclasses.replace(small_model().cfg, **fields | changes))


@pytest.fixture(scope="module")
def cfg(default_tokenizer):
    return tiny_config(default_tokenizer, quantized=False)


@pytest.fixture(scope="module")
def token_map(default_tokenizer, cfg):
    return compressed_ids(default_tokenizer, cfg)


@pytest.fixture(scope="module")
def program(cfg, token_map):
    """The "sparse" phase of `train_step`, compiled once for all tests here."""
    state = abstract_state(cfg, OPTIMISATION)
    stage = Stage("sparse", LENGTH, BATCH, share=1)
    return run_module.compile_stage(state, token_map, cfg, stage, RunConfig(settings=OPTIMISATION))


def batch(cfg, seed=0):
    tokens = np.random.default_rng(seed).integers(3, 600, (BATCH, LENGTH + 1)).astype(np.int32)
    return tokens, np.ones(tokens.shape, np.float32)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
def test_quantisers_pass_gradients_and_change_no_value(kind):
    x = jax.random.normal(jax.random.key(0), (5, 64), jnp.bfloat16)
    qdq, pack, unpack = (getattr(quant, f"{name}_{kind}") for name in ("qdq", "pack", "unpack"))
    cotangent = x[::-1]

    @jax.jit
    def run(x):
        value, backward = jax.vjp(qdq, x)
        return value, unpack(pack(x), x.dtype), backward(cotangent)[0]

    value, expected, gradient = run(x)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(gradient, cotangent)


@pytest.mark.parametrize(("shape", "block"), [((64, 96), (32, 32)), ((33, 40), (32, 32)), ((7, 64), (1, 32))])
def test_fp8_weights_keep_what_they_can_hold(shape, block):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    @jax.jit
    def through(x):
        elements, scale = quant.encode_fp8_blocks(x, block)
        return quant.dequantize_blocks(elements, scale, block, jnp.float32), scale

    decoded, scale = through(x)
    np.testing.assert_array_equal(through(decoded)[0], decoded)
    np.testing.assert_allclose(decoded, x, rtol=2**-4, atol=2**-9 * np.abs(x).max())
    # A scale half as large would not hold the largest element of its block.
    largest = np.abs(np.pad(x, [(0, -n % b) for n, b in zip(shape, block, strict=True)]))
    largest = largest.reshape(scale.shape[0], block[0], scale.shape[1], block[1]).max((1, 3))
    power = np.exp2(np.asarray(scale, np.float64) - 127)
    assert np.all(largest <= 448 * power) and np.all(largest > 448 * power / 2)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([1, 4, 9]), st.booleans())
def test_masks_are_the_models_selections(seed, entries, keep, coarse):
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((6, 40)).astype(np.float32)
    if coarse:  # ties, zeros of both signs
        scores = np.round(scores) * rng.choice([-1, 1], scores.shape)
    scores[:, entries:] = 9
    visible = rng.integers(0, entries + 1, 6).astype(np.int32)
    chosen = np.asarray(_selected(scores, visible, keep))
    expected = np.zeros((6, 41), bool)
    np.put_along_axis(expected, np.where(chosen < 0, 40, chosen), True, 1)
    np.testing.assert_array_equal(_mask(scores, visible, keep), expected[:, :40])
    blocks = np.asarray(_blocks(scores, visible, min(keep, 5), 8))
    allowed = np.repeat(blocks, 8, 1) & (np.arange(40) < visible[:, None])
    found = np.asarray(_block_mask(scores, visible, min(keep, 5), 8)) & (np.arange(40) < visible[:, None])
    np.testing.assert_array_equal(found, allowed)
    restricted = np.asarray(_selected(np.where(allowed, scores, -np.inf), visible, keep))
    expected = np.zeros((6, 41), bool)
    np.put_along_axis(expected, np.where(restricted < 0, 40, restricted), True, 1)
    np.testing.assert_array_equal(_mask(scores, visible, keep, allowed), expected[:, :40])


_selected = jax.jit(select_top, static_argnums=2)
_mask = jax.jit(top_mask, static_argnums=2)
_blocks = jax.jit(candidate_blocks, static_argnums=(2, 3))
_block_mask = jax.jit(candidate_mask, static_argnums=(2, 3))


def test_the_model_learns_with_what_is_stored(default_tokenizer, token_map, tmp_path):
    cfg = tiny_config(default_tokenizer, quantized=True)
    masters = init_masters(cfg, 1)
    both = jax.jit(lambda m: [f(m, cfg, token_map) for f in (rounded_params, stored_params)])
    rounded, stored = both(masters)
    seen = set()

    def check(a, b):
        seen.add(type(b))
        if isinstance(b, _WEIGHTS):
            a, b = _values(a), _values(b)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(check, rounded, stored, is_leaf=lambda x: isinstance(x, _WEIGHTS))
    assert {Fp8Weight, Mxfp4Weight, DenseWeight} <= seen

    export_checkpoint(masters, cfg, default_tokenizer, tmp_path / "model")
    loaded = load_params(tmp_path / "model", cfg)
    for (name, a), (_, b) in zip(named_leaves(loaded), named_leaves(stored), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


_WEIGHTS = (DenseWeight, Fp8Weight, Mxfp4Weight, RoundedWeight)
_values = jax.jit(lambda weight: dequantize(weight, jnp.bfloat16))


def test_the_forward_of_training_is_the_models(default_tokenizer):
    """Three layers: both ratios, and one that selects from the candidates of another."""
    cfg = tiny_config(
        default_tokenizer,
        quantized=True,
        num_hidden_layers=3,
        compress_ratios=(2, 1, 1, 0),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1, 2),
        candidate_source_layer_id=1,
    )
    stored = random_params(cfg, 3)

    def decoded(weight):
        return RoundedWeight(_values(weight)) if isinstance(weight, (Fp8Weight, Mxfp4Weight)) else weight

    rounded = jax.tree.map(decoded, stored, is_leaf=lambda x: isinstance(x, _WEIGHTS))
    tokens = jnp.asarray(batch(cfg)[0][:2, :-1])

    def logits(params):
        model = merge(cfg, params)
        out = training_forward(model, tokens, numerics=REFERENCE, select=True, offset=jnp.int32(3))
        return linear_fp32(out.hidden, model.head), out.index_loss

    found, index_loss = jax.jit(logits, compiler_options={"xla_allow_excess_precision": False})(rounded)
    np.testing.assert_array_equal(found, forward(stored, tokens, cfg=cfg).logits)
    assert np.all(np.asarray(index_loss) > 0)


def test_every_parameter_of_the_model_learns(cfg, token_map, program):
    before = init_state(cfg, 0, OPTIMISATION)
    names = [name for name, _ in named_leaves(before.masters)]
    old = jax.tree.leaves(jax.device_get(before.masters))
    state, report = program(before, *batch(cfg), np.float32(1), token_map)
    new = jax.tree.leaves(state.masters)
    moved = {name for name, a, b in zip(names, old, new, strict=True) if not np.array_equal(a, b)}
    untaught = ("mtp.", "vision.", "aligner.")
    mine = {name for name in names if not name.startswith(untaught)}
    # Routing biases have a rule of their own, which leaves them alone where the load is even; there are no images.
    assert {name for name in mine if "gate.bias" not in name and not name.startswith("image_")} <= moved <= mine
    assert all(np.all(np.isfinite(value)) for value in jax.tree.leaves(report))


def test_every_parameter_of_the_draft_learns(cfg, token_map):
    masters = init_masters(cfg, 0)
    tokens, weights = (a[:, :-1] for a in batch(cfg))
    rng = np.random.default_rng(1)
    features = rng.standard_normal((BATCH, LENGTH, cfg.hidden_size)).astype(jnp.bfloat16)
    logits = rng.standard_normal((BATCH, LENGTH, cfg.vocab_size)).astype(np.float32)

    @jax.jit
    def gradients(stages):
        def loss(stages):
            model = merge(cfg, rounded_params(masters | {"mtp": stages}, cfg, token_map))
            arguments = (jnp.asarray(a) for a in (tokens, weights, features, logits))
            losses, _ = draft_losses(model, *arguments, jnp.int32(2), REFERENCE)
            return losses["draft"] + losses["confidence"], losses

        return jax.grad(loss, has_aux=True)(stages)

    found, losses = gradients(masters["mtp"])
    assert [n for n, g in named_leaves(found) if not np.any(g)] == ["0.ffn.gate.bias", "0.ffn.gate.bias_vl"]
    assert 0 <= losses["accepted"] <= cfg.dspark_block_size and 0 <= losses["draft_agreement"] <= 1


def test_a_phase_trains_its_part_alone(cfg):
    ones = {name: np.ones(1) for name in trained_spec(cfg)}
    found = {phase: {n for n, a in only_trained(ones, phase).items() if a} for phase in ("dense", "sparse", "draft")}
    assert found["draft"] == {"mtp"}
    assert found["dense"] == found["sparse"] == set(ones) - {"mtp", "vision", "aligner"}


def test_a_batch_is_learnt(cfg, token_map, program):
    state, data = init_state(cfg, 0, OPTIMISATION), batch(cfg)
    reports = []
    for _ in range(25):
        state, report = program(state, *data, np.float32(1), token_map)
        reports.append(report)
    assert reports[-1]["loss"] < 0.75 * reports[0]["loss"]
    assert reports[-1]["accuracy"] > reports[0]["accuracy"]


def test_a_resumed_run_is_the_uninterrupted_one(cfg, default_tokenizer, program, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "compile_stage", lambda *_: program)
    monkeypatch.setattr(run_module, "_LOG_EVERY", 2)
    mixtures = [Mixture((skill,), text_share=0) for skill in ("copy", "reverse")]
    plan = tuple(Stage("sparse", LENGTH, BATCH, share=1, steps=2, mixture=mixture) for mixture in mixtures)
    run = RunConfig(settings=OPTIMISATION, examined=0)
    arguments = cfg, plan, default_tokenizer, []
    whole, done = train(*arguments, tmp_path / "whole", run)
    assert done and int(whole.step) == 4
    for _ in range(3):
        state, done = train(*arguments, tmp_path / "parts", dataclasses.replace(run, stop_after=0.0))
    assert done
    for (name, a), b in zip(named_leaves(whole.masters), jax.tree.leaves(state.masters), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    logs = [(tmp_path / d / "log.jsonl").read_text().splitlines() for d in ("whole", "parts")]
    logs = [[{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in log] for log in logs]
    assert logs[0] == logs[1] and len(logs[0]) == 2
    assert read_plan(tmp_path / "whole" / "plan.json") == plan


def test_masters_travel_in_small_files(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr("dsv4jax.training.parameters._PART_BYTES", 20_000)
    masters = init_masters(cfg, 1)
    write_masters(tmp_path, masters, 12)
    assert max(f.stat().st_size for f in tmp_path.iterdir()) < 40_000
    found, step = read_masters(tmp_path, cfg)
    assert step == 12
    for (name, a), (_, b) in zip(named_leaves(masters), named_leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(a).astype(jnp.bfloat16).astype(np.float32), b, err_msg=name)
    next(iter(tmp_path.glob("part-3.npz"))).unlink()
    with pytest.raises(ValueError, match="expected"):
        read_masters(tmp_path, cfg)


def test_the_default_plan(default_tokenizer, tmp_path):
    assert sum(stage.share for stage in DEFAULT_PLAN) == pytest.approx(1)
    cfg = default_config(default_tokenizer)
    for stage in DEFAULT_PLAN:
        assert stage.length % cfg.sliding_window == 0
    assert max(s.length for s in DEFAULT_PLAN) >= 32 * max(cfg.index_topk, cfg.sliding_window)
    plan = tuple(dataclasses.replace(stage, steps=100) for stage in DEFAULT_PLAN)
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan
    rates = [learning_rate(plan, i, step) for i in range(3) for step in range(100)]
    assert rates[0] == 0 and max(rates) > 0.99 and rates[-1] < 0.06
    assert learning_rate(plan, 3, 0) == 0
    (tmp_path / "plan.json").write_text("[{}]")
    with pytest.raises(ValueError, match=r"plan\.json: not a plan"):
        read_plan(tmp_path / "plan.json")
