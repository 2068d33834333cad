"""Golden data of two tiny models, made by an independent implementation: inputs, outputs and captures per module.

Arrays are float32 as the reference ran them; keys are explained in `tests/data/golden/README.md`.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.checkpoint.load import load_params
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import Numerics
from dsv4jax.weights import DenseWeight, Fp8Weight, Mxfp4Weight, dequantize

DATA = Path(__file__).parent / "data" / "golden"
TINY = ("tiny_a", "tiny_b")

NOQUANT = Numerics(dtype=jnp.float32, quantize_activations=False, quantize_cache=False)
"""float32 without any rounding: structure is judged here, to 1e-4."""
FLOAT32 = Numerics(dtype=jnp.float32, quantize_activations=False)
"""float32 with quantised caches: quantisers and selections are judged here, module by module."""


class Golden(NamedTuple):
    """One tiny model and its data."""

    name: str
    cfg: ModelConfig
    params: dict[str, Any]

    def data(self, file: str) -> Any:
        """The arrays of one npz file."""
        return _arrays(self.name, file)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the stored sequences."""
        return sorted(int(k[4:]) for k in self.data("inputs").files if k[4:].isdigit() and k.startswith("ids_"))


@functools.cache
def golden(name: str) -> Golden:
    """The model from its quantised checkpoint."""
    path = DATA / name / "checkpoint_quantized"
    cfg = ModelConfig.from_checkpoint(path)
    return Golden(name, cfg, load_params(path, cfg, progress=False))


@functools.cache
def _arrays(name: str, file: str) -> Any:
    return np.load(DATA / name / f"{file}.npz")


@functools.cache
def functions() -> Any:
    """Inputs and outputs of single functions."""
    return np.load(DATA / "functions" / "functions.npz")


@functools.cache
def small_model(quantized: bool = False) -> Golden:
    """Eight layers of tiny_a, one at least of each kind (window, Engram, full, reuse, candidate source, reindex).

    Compiles in half the time of the whole; by default with decoded weights, which saves half again.
    """
    return _some_layers(
        quantized,
        layers=(0, 1, 2, 3, 5, 8, 10, 11),
        stages=(0, 1, 2),
        compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(2, 4, 5),
        index_source_layer_ids=(2, 4, 5, 6),
        candidate_source_layer_id=5,
        engram_layer_ids=(1,),
        dspark_target_layer_ids=(5, 6, 7),
    )


@functools.cache
def drafting_model(quantized: bool = False) -> Golden:
    """Three layers of tiny_a and two draft stages: one of everything that a step leaves behind.

    One feature of the draft comes from the encoder half. Compiles in half the time of `small_model`.
    """
    return _some_layers(
        quantized,
        layers=(2, 8, 11),
        stages=(0, 2),
        compress_ratios=(2, 1, 1, 0, 0),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=1,
        engram_layer_ids=(0,),
        dspark_target_layer_ids=(0, 1, 2),
    )


def _some_layers(quantized: bool, layers: tuple[int, ...], stages: tuple[int, ...], **fields: Any) -> Golden:
    """The given layers and draft stages of tiny_a as a model of their own, with one Engram layer."""
    whole = golden("tiny_a")
    cfg = dataclasses.replace(
        whole.cfg,
        num_hidden_layers=len(layers),
        num_nextn_predict_layers=len(stages),
        engram_num_embeddings=whole.cfg.engram_num_embeddings[:1],
        quantized=quantized,
        **fields,
    )
    picked = {i: dict(whole.params["layers"][layer]) for i, layer in enumerate(layers)}
    engram = whole.params["layers"][whole.cfg.engram_layer_ids[0]]["engram"]
    for i, layer in picked.items():
        layer.pop("engram", None)
        if i in cfg.engram_layer_ids:
            layer["engram"] = engram
    mtp = {i: whole.params["mtp"][stage] for i, stage in enumerate(stages)}
    params = whole.params | {"layers": picked, "mtp": mtp}
    if not quantized:
        params = jax.tree.map(
            lambda w: DenseWeight(dequantize(w, jnp.bfloat16)) if isinstance(w, Fp8Weight | Mxfp4Weight) else w,
            params,
            is_leaf=lambda w: isinstance(w, Fp8Weight | Mxfp4Weight),
        )
    return Golden("small", cfg, params)
