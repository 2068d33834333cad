"""Options that XLA compiles the steps with: the one place where they are chosen.

They are given to `jax.jit`, so no environment variable is needed, and each applies to its platform alone: options that
begin with `xla_gpu_` mean nothing to a CPU. `scripts/bench_steps.py --check_flags` compares outputs and times under
`VARIANTS`.
"""

import functools
from collections.abc import Mapping

import jax

STEP_OPTIONS: Mapping[str, str | int | bool] = {
    # By default XLA drops a rounding to a narrow type that is followed by a widening: these are part of the model.
    "xla_allow_excess_precision": False,
    # The whole step as CUDA graphs, our kernels included: the host sends one instead of a thousand kernels, and there
    # is hardly a gap between these. A decode step of 40 layers takes 24.3 ms, kernel by kernel 25.0; of 6 layers 3.6
    # and 5.3 (one H200, JAX 0.11.2).
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": 1,
}
"""What steps are compiled with. `Lowered.compile(compiler_options=...)` overrides single ones."""

KERNEL_BY_KERNEL: Mapping[str, str | int | bool] = {"xla_gpu_enable_command_buffer": ""}
"""Overrides of `STEP_OPTIONS`: no graphs, so that a profile attributes kernels to operations."""

jit_step = functools.partial(jax.jit, compiler_options=dict(STEP_OPTIONS))
"""`jax.jit` for steps."""

VARIANTS: Mapping[str, Mapping[str, str | int | bool]] = {"in force": {}, "kernel by kernel": KERNEL_BY_KERNEL}
"""Overrides of `STEP_OPTIONS` whose outputs must be the same, bit for bit; the first is what the others are held
against."""
