"""Exports the steps of an engine: compiled programs, portable ones, and weights as they take them (docs/export.md).

python scripts/export.py --output exported
python scripts/export.py --model /path/to/checkpoint --output exported --slots 64 --decode_requests 8,64 --pages 4000
python scripts/export.py --model /path/to/config --noweights --target cuda --device_kind "NVIDIA H200" --pages 4000 ...

`scripts/serve.py --executables exported` and `scripts/generate.py --executables exported` run them.
"""

import contextlib
import os
import time
from pathlib import Path

import command_line
from absl import flags, logging
from engine_flags import MEMORY_FRACTION, PAGES, RANKS, check_sizes, make_shape
from executables import use_virtual_devices

from dsv4jax.checkpoint.engram_tables import HostEngramTables
from dsv4jax.checkpoint.files import COMPANIONS
from dsv4jax.checkpoint.load import compressed_ids
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_params import load_engine_params
from dsv4jax.engine.memory_plan import memory_plan
from dsv4jax.engine.programs import Programs
from dsv4jax.export import compare_programs, export_steps, load
from dsv4jax.tokenizer import Tokenizer
from sharding import tracing_for

_MODEL = flags.DEFINE_string("model", None, "Checkpoint, or with --noweights its config.json. Default: as serve.py.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write; must not exist.", required=True)
_WEIGHTS = flags.DEFINE_bool("weights", True, "Write the weights too, as the programs take them.")
_CHECK = flags.DEFINE_bool("check", False, "Run all programs as compiled and as loaded, and compare the bits.")
_TARGET = flags.DEFINE_enum(
    "target", None, ["cpu", "cuda"], "Lower for a platform that is not here: portable exports only, --noweights."
)
_DEVICE_KIND = flags.DEFINE_string("device_kind", "NVIDIA H200", "With --target=cuda, the GPU.")


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    begin = time.perf_counter()
    if _TARGET.value and _WEIGHTS.value:
        raise ValueError(f"--target={_TARGET.value}: needs --noweights, weights are packed on the devices themselves")
    if _CHECK.value and not _WEIGHTS.value:
        raise ValueError("--check: needs weights")
    if _TARGET.value and PAGES.value is None:
        raise ValueError("--pages: must be given with --target, whose memory is not known here")
    use_virtual_devices(RANKS.value)
    model = command_line.model_path(_MODEL.value)
    cfg = ModelConfig.from_checkpoint(model)
    sizes = check_sizes(cfg, embedded=not _MODEL.value)
    target = (_TARGET.value, "cpu" if _TARGET.value == "cpu" else _DEVICE_KIND.value) if _TARGET.value else None
    # Kernels are lowered for one device only: over several, plain JAX for the target.
    one = target is not None and RANKS.value == 1
    with tracing_for(*target) if one else contextlib.nullcontext():
        shape = make_shape(cfg, sizes)
        layout = shape.layout
        tables = token_map = params = None
        if not shape.tables_on_device:
            tables, token_map = HostEngramTables(model, cfg), compressed_ids(Tokenizer.from_checkpoint(model), cfg)
        if _WEIGHTS.value:
            options = {"tables_on_device": shape.tables_on_device, **shape.slots_of_experts}
            plan = memory_plan(cfg, shape.cache, shape.numerics, layout, fraction=MEMORY_FRACTION.value, **options)
            plan.require()
            params = load_engine_params(model, cfg, shape, layout)
        programs = None
        if target is None:
            programs = Programs(
                cfg, shape.cache, shape.buckets, shape.numerics, layout, tables, token_map,
                **shape.slots_of_experts,
            )  # fmt: skip
        export_steps(
            _OUTPUT.value,
            cfg,
            shape,
            compiled=programs and programs.compiled,
            files={name: (model / name).read_bytes() for name in COMPANIONS if (model / name).is_file()},
            params=params,
            tables=tables,
            token_map=token_map,
            target=target,
            xla_flags=os.environ.get("XLA_FLAGS", ""),
        )
    if _CHECK.value:
        loaded = load(_OUTPUT.value, xla_flags=os.environ.get("XLA_FLAGS", "")).programs(tables, token_map)
        compare_programs(programs, loaded, params, **shape.slots_of_experts)
    size = sum(file.stat().st_size for file in Path(_OUTPUT.value).rglob("*") if file.is_file())
    print(f"{_OUTPUT.value}: {size / 1e6:,.1f} MB in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    command_line.run(main)
