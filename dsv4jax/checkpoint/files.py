"""Directories of a checkpoint or snapshot: written whole or not at all, and the small files that travel along."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

COMPANIONS = ("config.json", "tokenizer.json", "tokenizer_config.json")


@contextlib.contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """A temporary directory beside `path` that becomes `path` when the block ends, and vanishes when it raises.

    Raises:
      FileExistsError: `path` exists.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{str(path)!r} exists: give a path that does not")
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def companion_files(checkpoint: str | Path) -> dict[str, bytes]:
    """Name and content of configuration and tokenizer files in `checkpoint`; `config.json` and `tokenizer.json` must
    be there.

    Raises:
      FileNotFoundError: one of the two is missing.
    """
    found = {name: Path(checkpoint) / name for name in COMPANIONS if (Path(checkpoint) / name).is_file()}
    for name in COMPANIONS[:2]:
        if name not in found:
            raise FileNotFoundError(f"no {name} in {str(checkpoint)!r}: not a complete checkpoint directory")
    return {name: file.read_bytes() for name, file in found.items()}


def write_synced(file: Path, content: bytes) -> None:
    """Writes `file` and waits until it is on the disk."""
    with open(file, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
