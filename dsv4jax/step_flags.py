"""Options that XLA compiles the steps with: the one place where they are chosen.

They are given to `jax.jit`, so no environment variable is needed, and each applies to its platform alone: options that
begin with `xla_gpu_` mean nothing to a CPU. `scripts/bench_steps.py --check_flags` compares outputs and times under
`VARIANTS`.
"""

import functools
from collections.abc import Mapping

import jax

COMMAND_BUFFERS: Mapping[str, str | int] = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    ),
    "xla_gpu_graph_min_graph_size": 1,
}
"""The whole step as CUDA graphs, kernels and branches included. It takes longer where buffers move between steps, as
outputs do: a decode step of 40 layers took 40.3 ms with 22.6 ms of kernels, without graphs later 30.1 ms with 22.0 (one
H200, JAX 0.11.2, xla_gpu_command_buffer_update_mode=SKIP_TEMP)."""

STEP_OPTIONS: Mapping[str, str | int | bool] = {
    # By default XLA drops a rounding to a narrow type that is followed by a widening: these are part of the model.
    "xla_allow_excess_precision": False,
    # Every kernel is launched by itself, which a profile can also attribute to its operation.
    "xla_gpu_enable_command_buffer": "",
}
"""What steps are compiled with. `Lowered.compile(compiler_options=...)` overrides single ones."""

jit_step = functools.partial(jax.jit, compiler_options=dict(STEP_OPTIONS))
"""`jax.jit` for steps."""

VARIANTS: Mapping[str, Mapping[str, str | int]] = {
    "in force": {},
    "command buffers": COMMAND_BUFFERS,
    "command buffers without kernels of our own": {
        "xla_gpu_enable_command_buffer": COMMAND_BUFFERS["xla_gpu_enable_command_buffer"].replace("CUSTOM_CALL,", "")
    },
}
"""Overrides of `STEP_OPTIONS` whose outputs must be the same, bit for bit; the first is what the others are held
against."""
