"""Times kernels beside what PyTorch and the `humming-kernels` package offer for the same shapes, in one run.

    python scripts/bench_peers.py --output benchmarks/peers.json

Peers are not dependencies of this project: those that are not installed are left out and named. Each line is the
device time of a call's kernels from the profiler of its framework. Needs a GPU, and PyTorch beside JAX.
"""

import dataclasses
import datetime
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import torch
from absl import app, flags

from pallas_kernels.moe_experts import benchmark as experts
from pallas_kernels.moe_experts.arg_specs import EXPERTS, HIDDEN, TOKENS, WIDTH, K
from pallas_kernels.timing import ceilings, device_microseconds
from pallas_kernels.topk import benchmark as topk
from pallas_kernels.topk.arg_specs import SHAPES
from pallas_kernels.topk.arg_specs import K as KEPT

_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)

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


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if jax.default_backend() != "gpu":
        raise app.UsageError(f"the default device is {jax.default_backend()}: kernels are timed on a GPU")
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
    records = []
    for case, peers in comparisons:
        fn, argument_sets = case.make()
        record = {"case": case.name, "goal": case.goal, "ours": device_microseconds(fn, argument_sets, LAUNCHES)}
        for peer, measure in peers.items():
            try:
                record[peer] = measure()
            except Exception as error:  # A peer that is absent or refuses the shape must not end the run.
                record[peer] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            torch.cuda.empty_cache()
        shown = ((key, f"{value:.1f}" if isinstance(value, float) else value) for key, value in record.items())
        print("; ".join(f"{key} {value}" for key, value in shown), flush=True)
        records.append(record)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "torch": torch.__version__,
        "ceilings": ceilings(),
        "cases": records,
    }
    Path(_OUTPUT.value).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
