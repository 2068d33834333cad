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
"""The whole step as CUDA graphs, kernels and branches included: 40 toy layers of 480 kernels took 3.1 ms instead of
3.7 ms by default and 4.7 ms without graphs (one H200, JAX 0.11.2). Collectives stay outside: alone in a graph they took
longer."""

SKIP_TEMP: Mapping[str, str] = {"xla_gpu_command_buffer_update_mode": "SKIP_TEMP"}
"""Graphs are not updated where only temporary buffers may have moved: 1.6 ms for the same step. Not in force until
`--check_flags` has shown on a GPU that outputs are equal. JAX 0.10.2 does not know it. SKIP_PROFILED takes 14 ms."""

NO_COMMAND_BUFFERS: Mapping[str, str] = {"xla_gpu_enable_command_buffer": ""}
"""Every kernel is launched by itself, which a profile can attribute to its operation."""

STEP_OPTIONS: Mapping[str, str | int | bool] = {
    # By default XLA drops a rounding to a narrow type that is followed by a widening: these are part of the model.
    "xla_allow_excess_precision": False,
    **COMMAND_BUFFERS,
}
"""What steps are compiled with. `Lowered.compile(compiler_options=...)` overrides single ones."""

jit_step = functools.partial(jax.jit, compiler_options=dict(STEP_OPTIONS))
"""`jax.jit` for steps."""

VARIANTS: Mapping[str, Mapping[str, str | int]] = {
    "no command buffers": NO_COMMAND_BUFFERS,
    "in force": {},
    "in force, SKIP_TEMP": SKIP_TEMP,
}
"""Overrides of `STEP_OPTIONS` whose outputs must be the same, bit for bit; the first is what the others are held
against."""
