"""Times kernels beside what PyTorch and the `humming-kernels` package offer for the same shapes, in one run.

    python scripts/bench_peers.py --report out

Peers are not dependencies of this project: those that are not installed are left out and named. Each line is the
device time of a call's kernels from the profiler of its framework. Needs a GPU, and PyTorch beside JAX.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence

import command_line
import jax
import numpy as np
import torch

from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result
from pallas_kernels.moe_experts import benchmark as experts
from pallas_kernels.moe_experts.arg_specs import EXPERTS, HIDDEN, TOKENS, WIDTH, K
from pallas_kernels.timing import ceilings, device_microseconds
from pallas_kernels.topk import benchmark as topk
from pallas_kernels.topk.arg_specs import SHAPES
from pallas_kernels.topk.arg_specs import K as KEPT

_REPORT = command_line.report_flag()

LAUNCHES = 12


def torch_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median device time of a call; `calls` are made in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    times = []
    for i in range(LAUNCHES):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            calls[i % len(calls)]()
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        times.append(sum(event.device_time_total for event in kernels))
    return statistics.median(times)


def grouped_matmul(tokens: int) -> float:
    """`torch._grouped_mm` of gate and up in bfloat16, rows sorted by expert."""
    ids = np.asarray(experts.arguments(tokens)[1])
    counts = np.bincount(ids.reshape(-1), minlength=EXPERTS)
    ends = torch.tensor(counts.cumsum(), dtype=torch.int32, device="cuda")
    x = torch.randn(tokens * K, HIDDEN, dtype=torch.bfloat16, device="cuda")
    weights = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    return torch_microseconds([functools.partial(torch._grouped_mm, x, weights, offs=ends)])


def top_k(shape: tuple[int, int]) -> float:
    """`torch.topk`, sorted by value."""
    scores = torch.randn(shape, device="cuda")
    return torch_microseconds([functools.partial(torch.topk, scores, KEPT)])


def humming_gate_up(tokens: int, activations: str) -> float:
    """Gate and up of FP4 weights, by the kernel that the package's own heuristics choose, through its test runner.

    Args:
      activations: "float8e4m3" with a scale per 32 channels, which is the model's format, or "bfloat16".
    """
    from humming import dtypes
    from humming.config import ComputeConfig, GemmType, LayerConfig
    from humming.testing.runner import KernelTestCase, KernelTestRunner

    quantized = activations == "float8e4m3"
    inputs = {"as_dtype": dtypes.float32, "input_quant_mode": "dynamic_group", "input_scale_group_size": 32}
    layer = LayerConfig(
        shape_n=2 * WIDTH,
        shape_k=HIDDEN,
        num_experts=EXPERTS,
        b_dtype=dtypes.float4e2m1,
        a_dtype=getattr(dtypes, activations),
        c_dtype=dtypes.bfloat16,
        bs_dtype=dtypes.float8e8m0,
        weight_scale_group_size=32,
        **(inputs if quantized else {}),
    )
    case = KernelTestCase(name="gate_up", layer_config=layer, compute_config=ComputeConfig(gemm_type=GemmType.INDEXED))
    runner = KernelTestRunner(dataclasses.replace(case, top_k=K))
    _, _, kernels = runner.prepare_kernels((tokens,))[0]
    kernel, tuning, _ = kernels[tokens][0]
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor(np.asarray(experts.arguments(tokens)[1]), dtype=torch.int32, device="cuda")
    rows, launch, _ = runner._prepare_problem(tokens, x, ids, tuning["block_shape"][0])
    _, rows, scale, scale_2 = runner.prepare_inputs(rows)
    launch |= {"inputs": rows, "input_scale": scale, "input_scale_2": scale_2}
    times = []
    for _ in range(LAUNCHES + 2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            runner._launch_kernel(tokens, launch, kernel)
            torch.cuda.synchronize()
        # The runner also fills its outputs and locks with zeros.
        times.append(max(e.device_time_total for e in profile.events() if "hum" in e.name.lower()))
    return statistics.median(times[2:])


def main() -> None:
    if jax.default_backend() != "gpu":
        raise ValueError(f"the default device is {jax.default_backend()}: kernels are timed on a GPU")
    comparisons = [
        (
            case,
            {
                "torch._grouped_mm, bfloat16": functools.partial(grouped_matmul, TOKENS[name]),
                "humming, FP4 x FP8 per 32": functools.partial(humming_gate_up, TOKENS[name], "float8e4m3"),
                "humming, FP4 x bfloat16": functools.partial(humming_gate_up, TOKENS[name], "bfloat16"),
            },
        )
        for name, case in [
            *((name, experts.decode_gate_up(name, goal)) for name, goal in experts.DECODE_GOALS.items()),
            *((name, experts.prefill_gate_up(name, goal)) for name, goal in experts.PREFILL_GOALS.items()),
        ]
    ]
    by_name = {case.name: case for case in topk.cases()}
    for name, shape in SHAPES.items():
        comparisons.append((by_name[f"topk {name}"], {"torch.topk": functools.partial(top_k, shape)}))
    given = conditions(
        model="kernels at the released shapes",
        layout="one device",
        flags=flag_values(globals()),
        seed=0,
        devices=jax.devices(),
        torch=str(torch.__version__),
    )
    result = Result(
        "peers",
        given,
        keys={"cases": ("case", "kernel")},
        control={"what": "the kernels of other packages for the same shapes"},
        ceiling={"what": "measured in the same run, bytes and operations per second", **ceilings()},
        plots=[Plot("bar", "Kernels and their peers", "cases", "case", ("microseconds",), Axis("case"),
                    Axis("time", "us"), by=("kernel",))],
        echo=True,
    )  # fmt: skip
    with reported(_REPORT.value, result):
        for case, peers in comparisons:
            ours = functools.partial(device_microseconds, *case.make(), LAUNCHES)
            # A peer that is absent or refuses the shape is a row with its error.
            for kernel, measure in {"ours": ours, **peers}.items():
                names = {"case": case.name, "kernel": kernel, "goal": case.goal}
                result.attempt("cases", names, lambda measure=measure: {"microseconds": measure()})
                torch.cuda.empty_cache()


if __name__ == "__main__":
    command_line.run(main)
