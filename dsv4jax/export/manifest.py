"""The manifest of an exported directory: what is in it, what it was made for, and whether that is here."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4jax.batch import DecodeBucket, PrefillBucket
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_shape import EngineShape
from dsv4jax.engine.programs import ProgramKey
from dsv4jax.export.trusted import check_directory, read_file

MANIFEST = "manifest.json"
_FORMAT = 1


class ExportMismatch(ValueError):
    """An exported directory was made for something else than what is here; names every entry that differs."""


@dataclasses.dataclass(frozen=True)
class Artefact:
    """A file of the directory."""

    file: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class ProgramRecord:
    """One program: signatures of its arguments, keyword arguments and results (`export.signature`), and its files."""

    arguments: list[Any]
    options: dict[str, Any]
    results: Any
    compiler_options: dict[str, Any]
    executable: Artefact | None
    """None where it could not be compiled, see `environment`'s `target`."""
    stablehlo: Artefact


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything about an exported directory but the programs themselves."""

    environment: dict[str, Any]
    config: ModelConfig
    shape: EngineShape
    parameters: Any
    """Signature of the parameters, which those of the programs refer to by this name; so for the cache."""
    cache: Any
    programs: dict[str, ProgramRecord]
    weights: bool
    """Whether there is a snapshot of the parameters."""

    @property
    def shared(self) -> dict[str, Any]:
        """What signatures refer to by name."""
        return {"parameters": self.parameters, "cache": self.cache}

    def to_json(self) -> str:
        """The content of the file."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {"config": self.config.to_dict(), "shape": self.shape.to_dict()}
        fields["programs"] = {name: dataclasses.asdict(record) for name, record in self.programs.items()}
        return json.dumps({"format": _FORMAT, **fields}, indent=None, separators=(",", ":"))


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a directory.

    Raises:
      FileNotFoundError: there is none.
      UntrustedPath: others could have changed it.
      ExportMismatch: it is of another format.
      ValueError: it is malformed.
    """
    directory = check_directory(path)
    try:
        content = read_file(directory, MANIFEST)
    except FileNotFoundError:
        raise FileNotFoundError(f"no {MANIFEST} in {str(directory)!r}: not an exported directory") from None
    try:
        fields = json.loads(content)
        found = fields.pop("format", None)
        if found != _FORMAT:
            raise ExportMismatch(f"format: exported with {found}, here {_FORMAT}")
        fields["config"] = ModelConfig.from_dict(fields["config"])
        fields["shape"] = EngineShape.from_dict(fields["shape"])
        fields["programs"] = {name: _record(record) for name, record in fields["programs"].items()}
        return Manifest(**fields)
    except ExportMismatch:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(directory / MANIFEST)!r} is malformed: {error!r}") from error


def _record(fields: Mapping[str, Any]) -> ProgramRecord:
    files = {name: fields[name] and Artefact(**fields[name]) for name in ("executable", "stablehlo")}
    return ProgramRecord(**{**fields, **files})


def differences(exported: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line per entry that differs."""
    return [
        f"{prefix}{name}: exported with {exported.get(name)}, here {here.get(name)}"
        for name in dict.fromkeys([*exported, *here])
        if exported.get(name) != here.get(name)
    ]


def program_name(key: ProgramKey) -> str:
    """The name of a program in manifest and directory."""
    if isinstance(key, str):
        return key
    if isinstance(key, tuple):
        return "masks_{}x{}".format(*key)
    if isinstance(key, PrefillBucket):
        parts = [f"prefill_{key.tokens}x{key.requests}x{key.pages}", f"tile{key.tile}", key.replay]
        parts += [f"images{key.images}"] * bool(key.images) + ["logprobs"] * key.prompt_logprobs
        return "_".join(parts)
    if isinstance(key, DecodeBucket):
        return f"decode_{key.requests}x{key.pages}x{key.tokens_per_request}"
    return f"draft_{key.requests}"
