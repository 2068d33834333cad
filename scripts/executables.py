"""The flag --executables of the scripts that run exported steps, and what follows from it."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import command_line
import jax
from absl import flags

from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_params import load_engine_params
from dsv4jax.export import ExportedSteps, forbid_tracing, load, read_manifest
from dsv4jax.params import Params

EXECUTABLES = flags.DEFINE_string(
    "executables",
    None,
    "Directory that `scripts/export.py` wrote, and nobody else can write to: its programs are loaded and nothing is"
    " traced. It also has configuration, tokenizer and weights, unless --model is given.",
)
_ON_MISMATCH = flags.DEFINE_enum(
    "on_mismatch",
    "refuse",
    ["refuse", "recompile"],
    "Where --executables are for another environment: end, or compile their portable form.",
)


def model_directory(model: str | None) -> Path:
    """Where configuration, tokenizer and weights are: --model, the exported directory, or the embedded model."""
    return command_line.model_path(model or EXECUTABLES.value)


def check_flags(decided: Iterable[flags.FlagHolder]) -> int:
    """Devices that the exported directory is for, as far as nothing is known to speak against it yet.

    Args:
      decided: flags that the directory takes the place of.

    Raises:
      ValueError: one of them is given; or as `dsv4jax.export.load`.
    """
    for flag in decided:
        if flag.present:
            raise ValueError(f"--{flag.name}: --executables decides it, must not be given with it")
    return read_manifest(EXECUTABLES.value).shape.devices


def use_virtual_devices(devices: int) -> None:
    """Of use on the CPU only."""
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)


def load_exported(stack: contextlib.ExitStack, cfg: ModelConfig) -> ExportedSteps:
    """The steps of --executables; from here to the end of `stack` tracing others is an error.

    Raises:
      ExportMismatch: the model has another configuration than the steps were exported for; or as `dsv4jax.export.load`.
    """
    stack.enter_context(forbid_tracing())
    exported = load(EXECUTABLES.value, on_mismatch=_ON_MISMATCH.value, xla_flags=os.environ.get("XLA_FLAGS", ""))
    exported.check_config(cfg)
    return exported


def load_exported_params(exported: ExportedSteps, model: str | None, cfg: ModelConfig) -> Params:
    """Those of --model if it is given, or the ones beside the steps.

    Raises:
      ValueError: there are none.
    """
    if model:
        return load_engine_params(model, cfg, exported.shape, exported.layout)
    if not exported.has_weights:
        raise ValueError(f"--model: must be given, {EXECUTABLES.value!r} was exported without weights")
    return exported.load_params()
