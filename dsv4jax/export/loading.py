"""Loading a directory of exported steps."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.export
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load

from dsv4jax.batch import EngramTables
from dsv4jax.cache import Cache, CacheConfig
from dsv4jax.checkpoint.snapshot import load_arrays
from dsv4jax.config import ModelConfig
from dsv4jax.engine.programs import (
    Bucket,
    ProgramKey,
    Programs,
    batch_shapes,
    compile_programs,
    mask_programs,
    step_function,
)
from dsv4jax.export.environment import environment
from dsv4jax.export.manifest import (
    ExportMismatch,
    Manifest,
    ProgramRecord,
    differences,
    program_name,
    read_manifest,
)
from dsv4jax.export.saving import WEIGHTS
from dsv4jax.export.signature import decode, difference, encode
from dsv4jax.export.trusted import check_directory, read_file
from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.params import Params, named_leaves
from sharding import SINGLE, Layout

_log = logging.getLogger(__name__)

OnMismatch = Literal["refuse", "recompile"]
_NEEDED = ("platform", "devices")
"""Entries of the environment without which the portable exports do not run either."""


def load(
    path: str | Path, *, on_mismatch: OnMismatch = "refuse", xla_flags: str = "", progress: bool = True
) -> "ExportedSteps":
    """The steps of an exported directory, which nobody but this user and root may be able to change: they are code.

    Args:
      on_mismatch: "recompile" compiles the portable exports where the compiled ones are for another environment.
      xla_flags: the variable XLA_FLAGS of this process.

    Raises:
      FileNotFoundError: no exported directory there.
      UntrustedPath: others could have changed it.
      ExportMismatch: it was exported for something else than what is here; names every entry.
      ValueError: a file is damaged.
    """
    if on_mismatch not in ("refuse", "recompile"):
        raise ValueError(f"on_mismatch = {on_mismatch!r}: must be 'refuse' or 'recompile'")
    directory = check_directory(path)
    manifest = read_manifest(path)
    here = environment(min(manifest.shape.devices, jax.device_count()), xla_flags)
    wrong = differences(manifest.environment, here)
    if not wrong and any(record.executable is None for record in manifest.programs.values()):
        wrong = ["executables: none were compiled when this was exported"]
    never = [name for name in _NEEDED if manifest.environment.get(name) != here[name]]
    if wrong and (never or on_mismatch == "refuse"):
        hint = "" if never else "; the portable exports can be compiled instead, on_mismatch = 'recompile'"
        raise ExportMismatch(f"{str(path)!r} is not for this process: {'; '.join(wrong)}{hint}")
    layout = manifest.shape.layout
    if wrong:
        _log.warning("compiling the portable exports of %s: %s", path, "; ".join(wrong))
    records = _records(manifest)
    programs = {key: _Signature.of(record, manifest, layout) for key, record in records.items()}
    if wrong:
        lowered = {key: _lowering(directory, records[key], signature) for key, signature in programs.items()}
        flat = compile_programs(lowered, progress)
        compiled = {key: _Unflattened(program, *programs[key].trees) for key, program in flat.items()}
    else:
        devices = [jax.devices()[0]] if layout.mesh is None else list(layout.mesh.devices.flat)
        with ThreadPoolExecutor() as pool:
            made = {
                key: pool.submit(_executable, directory, records[key], signature, devices)
                for key, signature in programs.items()
            }
            compiled = {key: future.result() for key, future in made.items()}
    return ExportedSteps(directory, manifest, layout, compiled, recompiled=bool(wrong))


@dataclasses.dataclass(frozen=True)
class _Signature:
    """Arguments, keyword arguments and results of a program."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: Any

    @classmethod
    def of(cls, record: ProgramRecord, manifest: Manifest, layout: Layout) -> "_Signature":
        """Raises ExportMismatch if the types in it are no more."""
        try:
            return cls(
                tuple(decode(node, layout, manifest.shared) for node in record.arguments),
                {name: decode(node, layout) for name, node in record.options.items()},
                decode(record.results, layout, manifest.shared),
            )
        except (AttributeError, ImportError, TypeError) as error:
            raise ExportMismatch(f"code: the types that steps take and return have changed: {error}") from error

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Positional and keyword arguments, in the order of the flat ones."""
        return self.arguments, self.options

    @property
    def trees(self) -> tuple[Any, Any]:
        """Structure of inputs and results."""
        return jax.tree.structure(self.inputs), jax.tree.structure(self.results)


def _records(manifest: Manifest) -> dict[ProgramKey, ProgramRecord]:
    """Raises ValueError if a program of the shape is missing."""
    shape = manifest.shape
    masks = mask_programs(manifest.config, shape.cache, shape.buckets)
    names = {key: program_name(key) for key in ("cache", *shape.buckets.steps, "start", *masks)}
    if missing := [name for name in names.values() if name not in manifest.programs]:
        raise ValueError(f"programs: the manifest lacks {', '.join(missing)}")
    return {key: manifest.programs[name] for key, name in names.items()}


def _executable(directory: Path, record: ProgramRecord, signature: _Signature, devices: list[jax.Device]) -> Any:
    artefact = record.executable
    content = read_file(directory, artefact.file, artefact.sha256)
    return deserialize_and_load(content, *signature.trees, devices[0].client, devices)


def _lowering(directory: Path, record: ProgramRecord, signature: _Signature) -> Callable[[], jax.stages.Lowered]:
    """A portable export made ready for compilation, with the donation that the file does not keep."""
    content = read_file(directory, record.stablehlo.file, record.stablehlo.sha256)
    exported = jax.export.deserialize(bytearray(content))
    leaves = jax.tree.leaves(signature.inputs)
    donated, first = [], 0
    for argument in signature.arguments:
        last = first + len(jax.tree.leaves(argument))
        donated += range(first, last) if isinstance(argument, Cache) else ()
        first = last
    jitted = jax.jit(exported.call, donate_argnums=donated, compiler_options=record.compiler_options or None)
    return lambda: jitted.lower(*leaves)


@dataclasses.dataclass(frozen=True)
class _Unflattened:
    """A compiled portable export with the arguments and results of the step."""

    program: jax.stages.Compiled
    inputs: Any
    results: Any

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten((arguments, options))
        if tree != self.inputs:
            raise TypeError(f"arguments: {tree}, the step was exported with {self.inputs}")
        return jax.tree.unflatten(self.results, self.program(*leaves))

    def memory_analysis(self) -> Any:
        return self.program.memory_analysis()


def load_weights(path: str | Path, manifest: Manifest, layout: Layout) -> Params:
    """The parameters of an exported directory; see `ExportedSteps.load_params`."""
    if not manifest.weights:
        raise FileNotFoundError(f"{str(path)!r} was exported without weights")
    shapes = decode(manifest.parameters, layout)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or one)
        for name, leaf in named_leaves(shapes)
    }
    loaded = load_arrays(Path(path) / WEIGHTS, wanted)
    return jax.tree.unflatten(jax.tree.structure(shapes), [loaded[name] for name in wanted])


class ExportedSteps:
    """Steps from an exported directory, to be called as the live ones, or as the programs of an engine.

    The steps take the same arguments as those of `dsv4jax.steps` and `dsv4jax.speculation`: batches in one of the
    exported buckets; `cfg`, `numerics` and `layout` must be what was exported. Caches are donated as there.

    Attributes:
      config, shape: model and engine that were exported.
      layout: of the shape, over devices of this process.
      recompiled: whether the programs were compiled here from the portable exports.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        layout: Layout,
        compiled: Mapping[ProgramKey, Any],
        recompiled: bool,
    ):
        self.config, self.shape, self.layout, self.recompiled = manifest.config, manifest.shape, layout, recompiled
        self._directory, self._manifest, self._compiled = directory, manifest, compiled
        self._by_batch = {
            (step_function(bucket).__name__, *_form(self._batch(bucket))): compiled[bucket]
            for bucket in manifest.shape.buckets.steps
        }

    def check_config(self, cfg: ModelConfig) -> None:
        """Raises ExportMismatch, with the fields, if the steps were exported for another configuration."""
        if wrong := differences(dataclasses.asdict(self.config), dataclasses.asdict(cfg), "config."):
            raise ExportMismatch(f"{str(self._directory)!r} is for another model: {'; '.join(wrong)}")

    def programs(self, tables: EngramTables | None = None, token_map: np.ndarray | None = None) -> Programs:
        """The programs of an engine; arguments as those of `Programs`, for Engram tables on the host.

        Raises:
          ValueError: tables for steps with the tables on the device, or none for others.
          ExportMismatch: batches are packed into other arrays here than the steps were exported with.
        """
        shape = self.shape
        if (tables is None) != shape.tables_on_device:
            raise ValueError(f"tables: the steps were exported with tables_on_device = {shape.tables_on_device}")
        for bucket in shape.buckets.steps:
            here = encode(batch_shapes(self.config, shape.cache, bucket, self.layout, tables, token_map))
            exported = self._manifest.programs[program_name(bucket)].arguments[2]
            if found := difference(exported, here, f"programs.{program_name(bucket)}.batch"):
                raise ExportMismatch(found)
        return Programs(
            self.config,
            shape.cache,
            shape.buckets,
            shape.numerics,
            self.layout,
            tables,
            token_map,
            **shape.slots_of_experts,
            compiled=self._compiled,
        )

    @property
    def has_weights(self) -> bool:
        """Whether `load_params` has something to load."""
        return self._manifest.weights

    def load_params(self) -> Params:
        """The parameters that were written beside the steps, on the devices and in the form that the steps take.

        Raises:
          FileNotFoundError: none were written.
          ValueError: the files do not hold them.
        """
        return load_weights(self._directory, self._manifest, self.layout)

    def init_cache(
        self, cfg: ModelConfig, cache_cfg: CacheConfig, numerics: Numerics = REFERENCE, layout: Layout = SINGLE
    ) -> Cache:
        """`dsv4jax.cache.init_cache`."""
        self._check({"cfg": cfg, "cache_cfg": cache_cfg, "numerics": numerics, "layout": layout})
        return self._compiled["cache"]()

    def start_request(self, cache: Cache, *rows: Any, layout: Layout = SINGLE) -> Cache:
        """`dsv4jax.steps.start_request`."""
        self._check({"layout": layout})
        return self._compiled["start"](cache, *(np.int32(row) if isinstance(row, int) else row for row in rows))

    def set_allowed_tokens(self, cache: Cache, slots: Any, masks: Any, *, layout: Layout = SINGLE) -> Cache:
        """`dsv4jax.steps.set_allowed_tokens`; as many rows as one of `shape.buckets.masks` on each rank, and masks for
        one place or for all.
        """
        self._check({"layout": layout})
        rows, allowed = len(slots) // self.layout.ranks, self.shape.buckets.masks
        if rows not in allowed:
            raise ValueError(f"slots: {rows} of each rank; exported are {allowed}")
        places = sorted({places for _, places in mask_programs(self.config, self.shape.cache, self.shape.buckets)})
        if np.shape(masks)[1] not in places:
            raise ValueError(f"masks: {np.shape(masks)[1]} places of each row; exported are {places}")
        return self._compiled[rows, np.shape(masks)[1]](cache, slots, masks)

    def prefill_step(self, params: Params, cache: Cache, batch: Any, **keywords: Any) -> Any:
        """`dsv4jax.steps.prefill_step`, without `collect`."""
        return self._run("prefill_step", params, cache, batch, keywords)

    def decode_step(self, params: Params, cache: Cache, batch: Any, **keywords: Any) -> Any:
        """`dsv4jax.steps.decode_step`, without `collect`."""
        return self._run("decode_step", params, cache, batch, keywords)

    def draft_step(self, params: Params, cache: Cache, batch: Any, **keywords: Any) -> Any:
        """`dsv4jax.speculation.draft_step`."""
        return self._run("draft_step", params, cache, batch, keywords)

    def speculative_step(self, params: Params, cache: Cache, batch: Any, **keywords: Any) -> Any:
        """`dsv4jax.speculation.speculative_step`, always with `step_seconds`."""
        return self._run("speculative_step", params, cache, batch, keywords)

    def _run(self, kind: str, params: Params, cache: Cache, batch: Any, keywords: dict[str, Any]) -> Any:
        static = {"numerics": REFERENCE, "layout": SINGLE} | {
            name: keywords.pop(name) for name in ("cfg", "numerics", "layout") if name in keywords
        }
        if "cfg" not in static:
            raise TypeError(f"{kind}: needs the keyword cfg")
        self._check(static)
        program = self._by_batch.get((kind, *_form(batch)))
        if program is None:
            exported = [b for b in self.shape.buckets.steps if step_function(b).__name__ == kind]
            raise ValueError(f"batch: of none of the buckets that {kind} was exported with: {exported}")
        return program(params, cache, batch, **keywords)

    def _check(self, given: dict[str, Any]) -> None:
        exported = {"cfg": self.config, "cache_cfg": self.shape.cache, "numerics": self.shape.numerics}
        exported["layout"] = self.layout
        for name, value in given.items():
            if value != exported[name]:
                raise ValueError(f"{name} = {value}: the steps were exported for {exported[name]}")

    def _batch(self, bucket: Bucket) -> Any:
        return decode(self._manifest.programs[program_name(bucket)].arguments[2], self.layout)


def _form(batch: Any) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves)
