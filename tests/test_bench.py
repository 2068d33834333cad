"""What benchmarks are made of: rank emulation, traces to stages, costs, reports, and the script as a whole."""

import dataclasses
import functools
import gzip
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from golden import small_model

from dsv4jax.bench.planning.hardware import STAGES as CALIBRATED
from dsv4jax.bench.planning.hardware import load_hardware
from dsv4jax.bench.results.result import Result, load
from dsv4jax.bench.steps import prefill
from dsv4jax.bench.steps.cases import PAGE, compare_programs, decode_case, prefill_case, prefill_chunks
from dsv4jax.bench.steps.costs import Cost, StepShape, step_costs
from dsv4jax.bench.steps.random_state import RandomHostTables, random_cache, random_params
from dsv4jax.bench.steps.stages import stage_lines, step_verdicts, table
from dsv4jax.bench.steps.trace import (
    OTHER,
    STAGES,
    Kernel,
    kernels_by_run,
    operation_paths,
    profile,
    read_trace,
    stage_of,
)
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.linear import Activations
from dsv4jax.model.transformer import merge
from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.params import abstract_params, named_leaves
from dsv4jax.step_flags import STEP_OPTIONS, VARIANTS

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import bench_steps
from bench_scripts import run_script
from command_line import sizes_of

from pallas_kernels.index_select import kernel
from sharding import SINGLE, Layout, emulated_rank, make_mesh
from sharding.exchange import exchange_bytes

PLAIN = Numerics(dtype=jnp.float32, quantize_activations=False, quantize_cache=False)
RATES = {"copy": 4e12, "fp8": 1500e12, "bf16": 800e12}


@pytest.fixture(scope="module")
def tiny() -> ModelConfig:
    """Four layers, one of each kind."""
    return dataclasses.replace(
        small_model(quantized=True).cfg,
        num_hidden_layers=4,
        compress_ratios=(0, 2, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        engram_layer_ids=(0,),
        dspark_target_layer_ids=(1, 2, 3),
        dspark_n_routed_experts=8,
        hc_sinkhorn_iters=2,
    )


@pytest.fixture(scope="module")
def params(tiny):
    return random_params(tiny, REFERENCE, emulated_rank(4))


# Rank emulation


def test_a_rank_holds_its_share_of_the_experts_and_the_rest_whole(tiny, params):
    specs, seen = dict(named_leaves(abstract_params(tiny))), dict(named_leaves(params))
    assert specs.keys() == seen.keys()
    for name, spec in specs.items():
        part = 4 if ".experts.*." in name else 1
        assert seen[name].shape == (spec.shape[0] // part, *spec.shape[1:]) and seen[name].dtype == spec.dtype, name
    with pytest.raises(ValueError, match="emulated_ranks = 3: must divide n_routed_experts = 8"):
        random_params(tiny, REFERENCE, emulated_rank(3))


def test_an_emulated_rank_computes_the_model_whose_ranks_hold_the_same_experts(tiny, params):
    whole = jax.tree_util.tree_map_with_path(
        lambda path, a: jnp.concatenate([a] * 4) if "'experts'" in str(path) and "'layers'" in str(path) else a, params
    )
    rng = np.random.default_rng(0)
    x = Activations(jnp.asarray(rng.normal(size=(12, tiny.hidden_size)), jnp.float32))
    valid, image = jnp.arange(12) < 10, jnp.zeros(12, bool)

    @functools.partial(jax.jit, static_argnums=1)
    def run(params, layout):
        return merge(tiny, params).layers[1].ffn(x, valid, image, PLAIN, layout)

    expected, chosen = run(whole, SINGLE)
    got, got_chosen = run(params, emulated_rank(4))
    np.testing.assert_allclose(got[:10], expected[:10], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got_chosen, chosen)


def test_an_emulated_rank_has_no_mesh():
    for layout in (dict(emulated_ranks=0), dict(emulated_ranks=2, mesh=make_mesh(1))):
        with pytest.raises(ValueError, match=f"emulated_ranks = {layout['emulated_ranks']}: must be at least 1, and 1"):
            Layout(**layout)


def test_the_exchange_carries_what_the_other_ranks_send():
    dispatch, combine = exchange_bytes(8, 96, 5120, 6)
    assert dispatch == 7 * 96 * (5120 * 2 + 6 * 4 + 6 * 4 + 1) and combine == 7 * 96 * 5120 * 4


# Traces


def gpu_events(gpus=1):
    """Two runs of a step as JAX writes them for GPUs: streams beside derived lines, other modules, host threads."""

    def line(pid, tid, name):
        return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}

    def kernel_of(start, duration, name, op, module="jit_decode_step(17)", pid=1, tid=13):
        args = {"hlo_module": module, "hlo_op": op, "correlation_id": "5"}
        return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": duration, "name": name, "args": args}

    events = [
        {"ph": "M", "pid": 9, "name": "process_name", "args": {"name": "/host:CPU"}},
        line(9, 3, "python"),
        {"ph": "X", "pid": 9, "tid": 3, "ts": 0.0, "dur": 900.0, "name": "PjitFunction(decode_step)"},
    ]
    for gpu in range(gpus):
        pid = 1 + gpu
        kernel = functools.partial(kernel_of, pid=pid)
        events += [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"/device:GPU:{gpu}"}},
            line(pid, 13, "Stream #13(Compute)"),
            line(pid, 14, "Stream #14(Compute)"),
            line(pid, 2, "XLA Ops"),
        ]
        for begin in (100.0 + gpu, 1100.0 + gpu):
            events += [
                kernel(begin, 10.0, "gather", "fusion.1"),
                kernel(begin + 20.0, 30.0, "mosaic_gpu_experts", "custom-call.7"),
                kernel(begin + 40.0, 20.0, "gemm", "custom-call.8", tid=14),
                kernel(begin + 70.0, 5.0, "copy", "copy.3"),
                kernel(begin, 75.0, "fusion.1", "fusion.1", tid=2),
                kernel(begin + 80.0, 50.0, "fusion.1", "fusion.1", module="jit_other(3)"),
            ]
    return events


HLO = """HloModule jit_decode_step, is_scheduled=true
%fused_computation (p: f32[4]) -> f32[4] {
  ROOT %add.2 = f32[4]{0} add(%p, %p), metadata={op_name="jit(decode_step)/embed/add"}
}
ENTRY %main {
  %fusion.1 = f32[4]{0} fusion(%p), kind=kLoop, metadata={op_name="jit(decode_step)/embed/add" source_line=2}
  %custom-call.7 = (f32[4]{0}, s32[1]) custom-call(%fusion.1), metadata={op_type="x" op_name="jit(step)/experts/jit(y)"}
  custom-call.8 = f32[4]{0} custom-call(%p), metadata={op_name="jit(decode_step)/experts/shared_expert/dot_general"}
  ROOT %copy.3 = f32[4]{0} copy(%custom-call.7)
}
"""


def test_kernels_of_a_gpu_trace_are_told_apart_by_run_stream_and_module():
    runs = kernels_by_run(gpu_events(), "jit_decode_step")
    names = [[kernel.name for kernel in run] for run in runs]
    assert names == [["gather", "mosaic_gpu_experts", "gemm", "copy"]] * 2
    spent = profile(runs, operation_paths(HLO))
    assert spent.microseconds == {"embed": 10.0, "experts": 30.0, "shared_expert": 20.0, OTHER: 5.0}
    assert spent.kernels == {"embed": 1, "experts": 1, "shared_expert": 1, OTHER: 1}
    launches = {"embed": "add", "experts": "jit(y)", "shared_expert": "dot_general", OTHER: "copy"}
    assert spent.launches == {(stage, launches[stage]): (1, us) for stage, us in spent.microseconds.items()}
    # 100-110, 120-150 with 140-160 beside it, 170-175.
    assert (spent.busy, spent.span, spent.gaps) == (55.0, 75.0, 20.0)


def test_devices_that_run_a_step_at_the_same_time_are_told_apart():
    one, two = (kernels_by_run(gpu_events(gpus), "jit_decode_step") for gpus in (1, 2))
    assert two[:2] == one and [[k.start for k in run] for run in two[2:]] == [[k.start + 1 for k in run] for run in one]
    assert profile(two, operation_paths(HLO)) == profile(one, operation_paths(HLO))


def test_a_trace_without_the_module_or_without_a_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no kernel of module 'jit_prefill_step'"):
        kernels_by_run(gpu_events(), "jit_prefill_step")
    with pytest.raises(ValueError, match="holds 0 traces: expected one"):
        read_trace(str(tmp_path), "jit_decode_step")
    (tmp_path / "plugins").mkdir()
    with gzip.open(tmp_path / "plugins" / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": gpu_events()}, file)
    assert len(read_trace(str(tmp_path), "jit_other")) == 2


def test_a_kernel_belongs_to_its_innermost_stage():
    assert stage_of("jit(decode_step)/experts/router/dot_general") == "router"
    assert stage_of("jit(decode_step)/attention_input/sparse_attention/jit(sparse_attention)/x") == "sparse_attention"
    assert stage_of("jit(decode_step)/jit(router)/add") == OTHER


def test_a_trace_of_this_machine_is_read_and_attributed(tmp_path):
    @jax.jit
    def inner(x):
        return jnp.sin(x) @ x

    @jax.jit
    def traced(x):
        with jax.named_scope("experts"):
            x = inner(x)
        with jax.named_scope("head"):
            return inner(jnp.tanh(x))

    x = jnp.ones((256, 256))
    program = traced.lower(x).compile()
    program(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            program(x).block_until_ready()
    spent = profile(read_trace(str(tmp_path), "jit_traced"), operation_paths(program.as_text()))
    assert spent.kernels.keys() >= {"experts", "head"}
    assert all(count == int(count) for count in spent.kernels.values())
    assert 0 < spent.busy <= spent.span


# Costs and reports


def test_weights_that_a_step_reads_are_those_of_the_parameters():
    """With every expert in use and few activations, the bytes of a step are those of the backbone's weights."""
    cfg = dataclasses.replace(ModelConfig(), num_experts_per_tok=384)
    specs = dict(named_leaves(abstract_params(cfg, tables_on_device=False)))
    read = sum(spec.nbytes for name, spec in specs.items() if name.startswith(("layers.", "head.")))
    costs = step_costs(cfg, StepShape(requests=1, tokens=10, context=0, decoder_tokens=10, logits=1))
    assert sum(cost.bytes for cost in costs.values()) == pytest.approx(read, rel=0.01)


def test_costs_follow_tokens_context_and_ranks():
    cfg = ModelConfig()
    near, far = (step_costs(cfg, StepShape(16, 96, context, 96, 96, 8)) for context in (131072, 875520))
    # Three sources of ratio 2 and one of ratio 1 read every key, and only these: candidates bound the others.
    entries = 16 * (875520 - 131072) * (3 / 2 + 1)
    assert far["index_select"].bytes - near["index_select"].bytes == pytest.approx(entries * 68)
    assert {stage for stage in near if near[stage] != far[stage]} == {"index_select"}
    # 96 tokens x 6 experts reach all but a few of 48.
    expert = 3 * 5120 * 2304 * 17 / 32
    assert 47.9 < (near["experts"].bytes - 40 * 768 * 5120 * 6) / expert / 40 < 48
    whole, tail = (step_costs(cfg, StepShape(1, 8192, 8192, tokens, 1)) for tokens in (8192, 128))
    assert tail["experts"].bf16 == pytest.approx(whole["experts"].bf16 / 2) and tail["experts"].fp8 > 0
    assert "dispatch" not in whole and "dispatch" in near


def test_a_floor_is_the_larger_of_bytes_and_operations():
    assert Cost(bytes=4e9).floor(RATES) == pytest.approx(1000)
    assert Cost(bytes=1, fp8=1.5e12, bf16=0.8e12).floor(RATES) == pytest.approx(2000)


def test_a_table_shows_every_stage_with_its_share_of_the_floor():
    spent = profile(
        [[Kernel("k", "a", 0.0, 60.0), Kernel("k", "b", 80.0, 20.0)]], {"a": "jit(f)/experts/x", "b": "jit(f)/head/y"}
    )
    lines = stage_lines(spent, {"experts": Cost(bytes=4e12 * 30e-6), "router": Cost(bytes=4e6)}, RATES)
    assert [line.stage for line in lines] == ["router", "experts", "head"]
    text = table(lines, spent, layers=2)
    assert re.search(r"^experts +1\.0 +60\.0 +75\.0% +120\.0 +0\.0 +30\.0 +50%$", text, re.M)
    assert "1.0 kernels per layer; from first to last 100.0 us, of which nothing ran for 20.0 (20.0%)" in text


def test_a_step_is_said_to_be_limited_by_what_takes_at_least_half_of_it():
    costs = {"experts": Cost(bytes=4e12 * 30e-6), "head": Cost(fp8=1500e12 * 10e-6)}

    def verdicts(experts: float, head: float, milliseconds: float, profiled: bool = True) -> list[str]:
        kernels = [Kernel("k", "a", 0.0, experts), Kernel("k", "b", experts, head)]
        spent = profile([kernels], {"a": "jit(f)/experts/x", "b": "jit(f)/head/y"})
        given = spent if profiled else None
        return step_verdicts("s", milliseconds, stage_lines(given, costs, RATES), given)

    distance = "s: takes 2.5 times what its bytes and operations would"
    assert verdicts(61, 39, 0.1) == ["s: limited by expert reads: 61% of the step", distance]
    assert verdicts(39, 61, 0.1)[0] == "s: limited by head products: 61% of the step"
    assert verdicts(50, 50, 0.1)[0] == "s: limited by expert reads: 50% of the step"
    assert verdicts(49, 30, 0.1)[0] == "s: no part alone limits the step: the largest is expert reads, 49%"
    assert verdicts(10, 10, 0.1)[0] == "s: limited by time without a kernel: 80% of the step"
    assert verdicts(1, 1, 0.1, profiled=False) == [f"{distance}; that floor is limited by expert reads: 75% of it"]
    lines = stage_lines(None, costs, RATES)
    assert [(line.stage, line.bound_by, line.kernels) for line in lines] == [
        ("experts", "reads", None), ("head", "products", None)
    ]  # fmt: skip


# Steps


def test_the_flags_of_the_steps_are_known_to_xla():
    for name, options in VARIANTS.items():
        compiled = jax.jit(lambda x: x + 1, compiler_options=dict(STEP_OPTIONS) | dict(options))
        assert compiled(1) == 2, name
    with pytest.raises(Exception, match="NOTHING"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_enable_command_buffer": "NOTHING"})(1)


def test_programs_that_differ_or_remember_their_arguments_are_found():
    @dataclasses.dataclass
    class Output:
        tokens: jax.Array
        logprobs: float = 0.0
        logits: float = 0.0

    def honest(params, cache, batch):
        return cache + params + batch, Output(cache * 2)

    def off_by_a_bit(params, cache, batch):
        cache, output = honest(params, cache, batch)
        return cache, Output(jnp.nextafter(output.tokens, jnp.inf))

    class Remembering:
        """Always reads the cache it was first given."""

        first = None

        def __call__(self, params, cache, batch):
            self.first = cache if self.first is None else self.first
            return honest(params, self.first, batch)

    programs = {"a": honest, "b": honest, "c": off_by_a_bit, "d": Remembering()}
    caches = iter([jnp.full(1, value) for _ in programs for value in (0.5, 7.0)])
    equal = compare_programs(programs, 1.0, 2.0, caches.__next__)
    assert equal == {"a": True, "b": True, "c": False, "d": False}


def test_chunks_cover_the_new_tokens_behind_the_cached_ones(tiny):
    chunks = prefill_chunks(tiny, new=100, cached=64, chunk=48)
    assert [(c.start, c.end) for c in chunks] == [(64, 112), (112, 160), (160, 164)]
    assert all(c.cached == c.window_floor == 64 and len(c.pages) * PAGE >= 164 for c in chunks)
    case = prefill_case(tiny, 100, 64, "bounded")
    assert case.batch.lengths.tolist() == [100] and case.batch.write_starts.tolist() == [64]
    assert case.shape.decoder_tokens == tiny.sliding_window
    assert decode_case(tiny, 3, 2, 70).batch.starts.tolist() == [70] * 3


def test_random_caches_and_host_tables_hold_finite_records(tiny):
    cache = random_cache(tiny, CacheConfig(slots=2, pages=1030), REFERENCE)
    keys = np.asarray(cache.index_keys[0])
    assert keys.any(-1).all() and not np.array_equal(keys[0], keys[1]) and np.array_equal(keys[0], keys[1024])
    rows = np.zeros((5, 1, tiny.engram_hash_columns), np.int64) + np.arange(5)[:, None, None]
    (found,) = RandomHostTables(tiny).lookup(rows)
    assert found.weight.shape == (5, tiny.engram_hash_columns, tiny.engram_head_dim)
    assert np.isfinite(found.weight.astype(np.float32)).all()


def test_sizes_stand_for_every_combination():
    assert sizes_of("decode", "1/8x6x1024/2048", (3,)) == [(1, 6, 1024), (1, 6, 2048), (8, 6, 1024), (8, 6, 2048)]
    assert sizes_of("prompts", "8x0x4", (3,), may_be_zero=(1,)) == [(8, 0, 4)]
    for text in ("8x0x4", "8x/1x4", "8xx4", "-1x1x4"):
        with pytest.raises(ValueError, match=f"--decode={text}: must be NxNxN, whole numbers of at least 1"):
            sizes_of("decode", text, (3,))


def test_optimisations_are_tried_alone_and_then_one_after_the_other():
    cut, tables, topk = prefill.OPTIMISATIONS
    found = [case.optimisations for case in prefill.prompt_cases(8, 0, (4, 2))]
    assert found == [set(), {cut}, {tables}, {topk}, {cut, tables}, {cut, tables, topk}, {cut, tables, topk}]
    names = [case.names for case in prefill.prompt_cases(8, 0, (4, 2))]
    assert names[0]["optimisations"] == "none" and names[4]["optimisations"] == "decoder cut + tables on device"
    assert [name["chunk"] for name in names] == [4] * 6 + [2]
    # Four tokens a second without any, five and ten with the first and with all; the median of repeats counts.
    taken = [((), 2.0), ((), 1.0), ((), 3.0), ((cut,), 1.6), (prefill.OPTIMISATIONS, 0.8)]
    rows = [
        {"new": 8, "cached": 0, "chunk": 4, "seconds": seconds, **{one: one in on for one in prefill.OPTIMISATIONS}}
        for on, seconds in taken
    ] + [{"new": 8, "cached": 0, "chunk": 2, "error": "out of memory"}]
    assert prefill.prompt_verdicts(rows) == [
        "8 tokens behind 0 in chunks of 4: 10 tokens/s with all optimisations",
        "8 tokens behind 0 in chunks of 4, against none: decoder cut +25.0%,"
        " decoder cut + tables on device + own topk +150.0%",
    ]


# The script


@pytest.fixture
def script(tmp_path, tiny, params, monkeypatch):
    """Runs it on the tiny model; returns the results that it wrote, by experiment."""
    monkeypatch.setattr(bench_steps, "random_params", lambda cfg, numerics, layout: params)
    (tmp_path / "config.json").write_text(json.dumps(tiny.to_dict()))

    def run(*arguments: str) -> dict[str, Result]:
        with flagsaver.flagsaver():
            flags.FLAGS(["bench", f"--model={tmp_path}", f"--report={tmp_path}", "--repeats=1", *arguments])
            bench_steps.main()
        pages = {path.stem: path.read_text() for path in tmp_path.glob("*.html")}
        assert all(f"<h1>{name}</h1>" in page for name, page in pages.items())
        return {name: load(tmp_path / f"{name}.json") for name in pages}

    return run


@pytest.mark.timeout(300)
def test_the_script_times_an_emulated_rank_and_reports_its_stages(script, tmp_path, capsys):
    (result,) = script("--ranks=4", "--decode=2x2x40", "--prefill=", "--profile", "--rounds=2").values()
    assert result.experiment == "forward" and not result.interrupted
    assert result.conditions["emulated_ranks"] == 4 and result.conditions["implementation"] == "reference"
    assert result.conditions["flags"]["rounds"] == 2 and result.ceiling["copy"] > 0
    one, two = result.rows["steps"]
    assert one["step"] == "decode 2 x 2 at 40" == two["step"] and (one["requests"], one["context"]) == (2, 40)
    assert one["milliseconds"] > 0 and 1 <= one["experts_in_use"] <= 2 and one["tokens_per_request"] == 2
    assert one["tokens_per_second"] == pytest.approx(4e3 / one["milliseconds"])
    assert StepShape(**one["shape"]) == StepShape(2, 4, 40, 4, 4, 4)
    stages = result.rows["stages"]
    assert sum(line["floor_microseconds"] for line in stages) == pytest.approx(one["floor_milliseconds"] * 1e3)
    # XLA may join the gather of the embedding and the sum of the combine with what follows.
    assert {line["stage"] for line in stages if line["kernels"]} >= set(STAGES) - {"embed", "combine"}
    assert result.rows["kernels"] and result.rows["profiles"][0]["busy"] > 0
    assert len(result.verdicts) == 2 and result.verdicts[1].startswith("decode 2 x 2 at 40: takes ")
    printed = capsys.readouterr().out
    assert "one rank of 4, the exchange by copies on the device" in printed
    assert re.search(r"^sparse_attention +\d", printed, re.M)
    plans_with_what_was_measured(result, tmp_path)


def plans_with_what_was_measured(measured: Result, directory: Path) -> None:
    """The planner takes its constants from the file that the script wrote, and plans the model that was measured."""
    own = directory / "own.json"
    given = [f"--calibrate={directory / 'forward.json'}", f"--save_hardware={own}", f"--report={directory}"]
    tried = ["--decode_widths=1,2", "--prefill_widths=2", "--batches=1,4", "--drafts=0", "--chunks=2048"]
    run_script("plan", f"--model={directory}", *given, *tried)
    hardware, plan = load_hardware(own), load(directory / "plan.json")
    assert hardware.memory_bandwidth.value == measured.ceiling["copy"]
    assert hardware.stages["experts"].kind == "measured" and "1 steps" in hardware.stages["experts"].source
    (row,) = plan.rows["calibration"]
    profiled = sum(line["microseconds"] or 0 for line in measured.rows["stages"] if line["stage"] in CALIBRATED)
    assert row["step"] == "decode 2 x 2 at 40" and row["measured_ms"] == pytest.approx(profiled / 1e3)
    # One point for each stage: whatever is slower than the machine's rates is fitted.
    assert row["model_ms"] >= 0.99 * row["measured_ms"]
    assert len(plan.rows["points"]) == 4 and plan.conditions["hardware"] == hardware.as_dict()
    # The released sizes are another model.
    with pytest.raises(ValueError, match="which must be the one that was measured"):
        run_script("plan", *given[:1])


def test_the_script_runs_all_chunks_behind_a_prefix_with_each_optimisation_alone_and_cumulatively(script, monkeypatch):
    seen = []

    class Lowered:
        def __init__(self, params, cache, batch, cfg, numerics, layout):
            self.tables = "embed" in params["layers"][cfg.engram_layer_ids[0]]["engram"]
            self.replay, self.topk = batch.replay, kernel.topk_pallas.__name__

        def compile(self, compiler_options):
            return self

        def __call__(self, params, cache, batch):
            assert self.tables == ("embed" in params["layers"][0]["engram"]) == (not batch.engram_rows)
            seen.append((self.replay, self.tables, self.topk, int(batch.starts[0]), int(batch.lengths[0])))
            return cache, dataclasses.make_dataclass("Output", ["tokens"])(jnp.zeros(1))

    class Step:
        lower = staticmethod(lambda params, cache, batch, **static: Lowered(params, cache, batch, **static))

    monkeypatch.setattr(prefill, "prefill_step", Step)
    monkeypatch.setattr(prefill, "random_cache", lambda *_: None)
    (result,) = script("--decode=", "--prefill=", "--prompts=100x64x64/128", "--rounds=1").values()
    own, other = "topk_pallas", "topk_reference"
    setups = [("exact", False, other), ("bounded", False, other), ("exact", True, other), ("exact", False, own)]
    setups += [("bounded", True, other), ("bounded", True, own)]
    chunks = [(64, 64), (128, 36)]
    expected = [(*setup, *chunk) for setup in setups for _ in range(2) for chunk in chunks]
    assert seen == expected + [("bounded", True, own, 64, 100)] * 2
    rows = result.rows["prompts"]
    assert [sum(row[name] for name in prefill.OPTIMISATIONS) for row in rows] == [0, 1, 1, 1, 2, 3, 3]
    assert all(row["tokens_per_second"] == pytest.approx(100 / row["seconds"]) for row in rows)
    assert any("decoder cut + tables on device + own topk" in line for line in result.verdicts)


def test_a_step_that_fails_is_a_row_with_its_error(script, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench_steps, "random_cache", fails)
    monkeypatch.setattr(bench_steps, "compile_apart", lambda lowerings, _: dict.fromkeys(lowerings))
    results = script("--decode=1x1x40", "--prefill=64", "--rounds=1", "--replay=exact")
    assert results.keys() == {"forward", "prefill"}
    for result in results.values():
        (row,) = result.rows["steps"]
        assert row["error"] == "RuntimeError: out of memory" and not result.verdicts


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--decode=16x6", "--decode=16x6: must be NxNxN, whole numbers of at least 1"),
        ("--decode=1x0x5", "--decode=1x0x5: must be NxNxN"),
        ("--prefill=8k", "--prefill=8k: must be N or NxN"),
        ("--prompts=100x64", "--prompts=100x64: must be NxNxN"),
        ("--compare --ranks=2", "--compare: must not be given with --ranks=2"),
        ("--implementation=pallas", 'implementation = "pallas": the device is cpu'),
    ],
)
def test_the_script_refuses_by_name_what_it_cannot_run(script, argument, message):
    with pytest.raises(Exception, match=re.escape(message)):
        script("--prefill=", "--decode=", *argument.split())
