"""Writing a directory of exported steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental.serialize_executable import serialize
from tqdm import tqdm

from dsv4jax.batch import EngramTables
from dsv4jax.checkpoint.files import atomic_directory, write_synced
from dsv4jax.checkpoint.snapshot import save_arrays
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_shape import EngineShape
from dsv4jax.engine.programs import Program, ProgramKey, compile_programs, list_programs
from dsv4jax.export.environment import environment
from dsv4jax.export.manifest import MANIFEST, Artefact, Manifest, ProgramRecord, program_name
from dsv4jax.export.signature import difference, encode
from dsv4jax.export.trusted import digest
from dsv4jax.params import Params, named_leaves

WEIGHTS = "weights"


def export_steps(
    path: str | Path,
    cfg: ModelConfig,
    shape: EngineShape,
    *,
    files: Mapping[str, bytes] | None = None,
    params: Params | None = None,
    compiled: Mapping[ProgramKey, Any] | None = None,
    tables: EngramTables | None = None,
    token_map: np.ndarray | None = None,
    target: tuple[str, str] | None = None,
    xla_flags: str = "",
    progress: bool = True,
) -> None:
    """Writes every program of an engine, compiled for the devices of this process and portably; whole or not at all.

    Args:
      path: must not exist.
      files: to be put beside them: configuration and tokenizer.
      params: to be written too, as the programs take them: `param_shapes` of the shape.
      compiled: `Programs.compiled` of this model and shape; None to compile them.
      tables, token_map: as in `Programs`, for Engram tables on the host.
      target: (platform, device kind) to export for without compiling, such as ("cuda", "NVIDIA H200") on a machine
        without one; tracing must be for that kind, see `jax.sharding.use_abstract_mesh`.
      xla_flags: the variable XLA_FLAGS of the process, which the programs are compiled under.

    Raises:
      FileExistsError: `path` exists.
      ValueError: the devices belong to several processes, or parameters of other shapes.
    """
    layout = shape.layout
    if layout.spans_processes:
        raise ValueError("layout: its devices belong to several processes, programs over which cannot be exported")
    here = environment(shape.devices, xla_flags, target)
    listed = list_programs(
        cfg, shape.cache, shape.buckets, shape.numerics, layout, tables, token_map, **shape.slots_of_experts
    )
    parameters = encode(next(p.arguments[0] for key, p in listed.items() if key in shape.buckets.steps))
    if params is not None and (found := difference(parameters, encode(_shapes(params)), "params")):
        raise ValueError(f"{found}: parameters must be as the programs take them")
    if target:
        compiled = {}
    elif compiled is None:
        compiled = compile_programs({key: program.lower for key, program in listed.items()}, progress)
    shared = {"parameters": parameters, "cache": encode(listed["start"].arguments[0])}
    with atomic_directory(path) as temporary:
        records = {}
        for key, program in tqdm(listed.items(), desc="exporting", unit="program", disable=not progress):
            name = program_name(key)
            exported, results = _portable(program, here["platform"])
            records[name] = ProgramRecord(
                arguments=[encode(argument, shared) for argument in program.arguments],
                options={option: encode(value) for option, value in program.options.items()},
                results=encode(results, shared),
                compiler_options=dict(program.compiler_options),
                executable=_write(temporary, f"{name}.executable", serialize(compiled[key])[0]) if compiled else None,
                stablehlo=_write(temporary, f"{name}.stablehlo", bytes(exported.serialize())),
            )
        manifest = Manifest(
            environment=here,
            config=cfg,
            shape=shape,
            parameters=parameters,
            cache=shared["cache"],
            programs=records,
            weights=params is not None,
        )
        for name, content in (files or {}).items():
            _write(temporary, name, content)
        _write(temporary, MANIFEST, manifest.to_json().encode())
        if params is not None:
            save_arrays(temporary / WEIGHTS, named_leaves(params))
        temporary.chmod(temporary.stat().st_mode & ~0o022)


def _portable(program: Program, platform: str) -> tuple[jax.export.Exported, Any]:
    """The program over flat arguments and results, lowered for a platform, and the shapes of its results."""
    leaves, tree = jax.tree.flatten((program.arguments, dict(program.options)))
    results = []

    def flat(*values: jax.Array) -> list[jax.Array]:
        arguments, options = jax.tree.unflatten(tree, values)
        result = program.function.__wrapped__(*arguments, **options, **program.static)
        results.append(_shapes(result))
        return jax.tree.leaves(result)

    return jax.export.export(jax.jit(flat), platforms=[platform])(*leaves), results[0]


def _shapes(arrays: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.typeof(a).sharding), arrays)


def _write(directory: Path, name: str, content: bytes) -> Artefact:
    file = directory / name
    write_synced(file, content)
    file.chmod(file.stat().st_mode & ~0o022)  # what others may write is not loaded
    return Artefact(name, len(content), digest(content))
