"""What a machine can do, as one JSON file of constants that each say where they come from.

A file has two mappings. `constants` has one entry `{"value", "kind", "source"}` for each field of `Hardware` that is a
`Constant`. `stages` has one entry `{"memory", "fp8", "bf16", "fixed", "kind", "source"}` for each stage of a step, see
`StageFactors`. Kinds are "measured", "nominal" (a data sheet's figure as it stands) and "assumed" (everything else; the
source says from what).
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from dsv4jax.bench.steps.costs import Cost

Kind = Literal["measured", "nominal", "assumed"]

GIVEN = ("h200", "b300", "gb300")
"""Names of the files that come with the project."""
STAGES = (
    "embed",
    "engram",
    "hyper_connections",
    "compress",
    "attention_input",
    "index_select",
    "sparse_attention",
    "attention_output",
    "router",
    "shared_expert",
    "experts",
    "head",
    "sample",
    "draft_context",
)
_MAY_BE_ZERO = ("link_latency", "network_latency", "gap", "host_step", "host_request")


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number and where it comes from."""

    value: float
    kind: Kind
    source: str


@dataclasses.dataclass(frozen=True)
class StageFactors:
    """Seconds of a stage: `memory` times those of its bytes, plus `fp8` and `bf16` times those of its operations at the
    machine's rates, plus `fixed` seconds for each layer that runs it.

    Factors are at least 1, so that no stage is faster than the machine; see `costs.Cost.floor`.
    """

    memory: float
    fp8: float
    bf16: float
    fixed: float
    kind: Kind
    source: str


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Constants of one device and what connects it to others.

    Bandwidths are bytes per second, rates operations per second (two per product), times seconds.

    Raises:
      ValueError: a value that is not allowed; names the field and says what is.
    """

    name: str
    memory_bytes: Constant
    memory_bandwidth: Constant
    """Read and written together."""
    fp8_rate: Constant
    bf16_rate: Constant
    link_devices: Constant
    """Devices that reach each other by links rather than the network."""
    link_bandwidth: Constant
    """What a device receives from all others together."""
    link_latency: Constant
    """Of the smallest exchange in one direction."""
    network_bandwidth: Constant
    """What a device receives from those that no link reaches."""
    network_latency: Constant
    gap: Constant
    """Without a kernel, per layer of a step."""
    host_step: Constant
    """What the host needs per step, beside the device."""
    host_request: Constant
    """The same, for each running request of all ranks that the process drives."""
    transfer_bandwidth: Constant
    """Of a request's cache, from a prefill device to a decode device."""
    stages: Mapping[str, StageFactors]

    def __post_init__(self):
        for name in CONSTANTS:
            constant = getattr(self, name)
            at_least = name in _MAY_BE_ZERO
            _number(name, constant.value, 0.0, exclusive=not at_least)
            _origin(name, constant.kind, constant.source)
        for stage in STAGES:
            if stage not in self.stages:
                raise ValueError(f"stages: {stage} is missing: must have {STAGES}")
        for stage, factors in self.stages.items():
            if stage not in STAGES:
                raise ValueError(f"stages: unknown stage {stage!r}: must be one of {STAGES}")
            for name, least in (("memory", 1.0), ("fp8", 1.0), ("bf16", 1.0), ("fixed", 0.0)):
                _number(f"stages: {stage}: {name}", getattr(factors, name), least)
            _origin(f"stages: {stage}", factors.kind, factors.source)

    def stage_seconds(self, stage: str, cost: Cost) -> tuple[float, float, float]:
        """Seconds that a stage takes for its bytes, for its operations, and in its layers however little they do."""
        factors = self.stages[stage]
        products = factors.fp8 * cost.fp8 / self.fp8_rate.value + factors.bf16 * cost.bf16 / self.bf16_rate.value
        return factors.memory * cost.bytes / self.memory_bandwidth.value, products, factors.fixed * cost.layers

    def at_its_rates(self) -> "Hardware":
        """The same machine if every stage ran at its rates, without gaps, latencies and host: for floors."""
        zero = Constant(0.0, "assumed", "none, for a floor")
        ideal = StageFactors(1.0, 1.0, 1.0, 0.0, "assumed", "at the machine's rates, for a floor")
        nothing = {name: zero for name in _MAY_BE_ZERO}
        return dataclasses.replace(self, stages=dict.fromkeys(STAGES, ideal), **nothing)

    def as_dict(self) -> dict[str, Any]:
        """The content of a file."""
        constants = {name: dataclasses.asdict(getattr(self, name)) for name in CONSTANTS}
        stages = {stage: dataclasses.asdict(factors) for stage, factors in self.stages.items()}
        return {"name": self.name, "constants": constants, "stages": stages}

    def as_ceiling(self) -> dict[str, Any]:
        """The constants, each with where it comes from, for `Result.ceiling`."""
        constants = {name: getattr(self, name) for name in CONSTANTS}
        return {
            "what": f"constants of {self.name}",
            **{name: f"{constant.value:.4g}, {constant.kind}" for name, constant in constants.items()},
        }

    def save(self, path: str | Path) -> None:
        """Writes a file that `load_hardware` reads."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")


CONSTANTS = tuple(field.name for field in dataclasses.fields(Hardware) if field.type is Constant)


def load_hardware(name_or_path: str | Path) -> Hardware:
    """The hardware of one of the `GIVEN` files, by its name, or of any other file.

    Raises:
      ValueError: no such file, or it is not as the module says; names the file, the field, its value and what is
        allowed.
    """
    if name_or_path in GIVEN:
        file = resources.files("dsv4jax.bench.planning") / "hardware" / f"{name_or_path}.json"
    else:
        file = Path(name_or_path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"hardware = {str(name_or_path)!r}: must be one of {GIVEN} or a file") from None
    except ValueError as error:
        raise ValueError(f"{name_or_path}: must be JSON: {error}") from None
    try:
        return hardware_from_dict(found)
    except ValueError as error:
        raise ValueError(f"{name_or_path}: {error}") from None


def hardware_from_dict(found: Any) -> Hardware:
    """The hardware in the content of a file; raises as `load_hardware`."""
    _fields("the file", found, ("name", "constants", "stages"))
    _fields("constants", found["constants"], CONSTANTS)
    if not isinstance(found["name"], str):
        raise ValueError(f"name = {found['name']!r}: must be a string")
    constants = {}
    for name, one in found["constants"].items():
        _fields(name, one, [field.name for field in dataclasses.fields(Constant)])
        constants[name] = Constant(**one)
    if not isinstance(found["stages"], Mapping):
        raise ValueError(f"stages = {found['stages']!r}: must be a mapping")
    stages = {}
    for stage, one in found["stages"].items():
        _fields(f"stages: {stage}", one, [field.name for field in dataclasses.fields(StageFactors)])
        stages[stage] = StageFactors(**one)
    return Hardware(name=found["name"], **constants, stages=stages)


def _fields(where: str, found: Any, names: Any) -> None:
    if not isinstance(found, Mapping):
        raise ValueError(f"{where} = {found!r}: must be a mapping with {tuple(names)}")
    for name in names:
        if name not in found:
            raise ValueError(f"{where}: {name} is missing")
    for name in found:
        if name not in names:
            raise ValueError(f"{where}: unknown field {name!r}: must be one of {tuple(names)}")


def _number(where: str, value: Any, least: float, exclusive: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < least or (exclusive and value == least):
        wanted = f"greater than {least:g}" if exclusive else f"at least {least:g}"
        raise ValueError(f"{where} = {value!r}: must be a number {wanted}")


def _origin(where: str, kind: Any, source: Any) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"{where}: kind = {kind!r}: must be one of {get_args(Kind)}")
    if not isinstance(source, str) or not source:
        raise ValueError(f"{where}: source = {source!r}: must say where the value comes from")
