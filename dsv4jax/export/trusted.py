"""Files that code is loaded from: only this user or the system's administrator may be able to change them.

A compiled program is code, and its container is a pickle, which runs code when it is opened. What others could have
written is therefore refused before a byte of it is read.
"""

import hashlib
import os
import stat
from pathlib import Path


class UntrustedPath(ValueError):
    """A file or directory that others could have changed."""


def check_directory(path: str | Path) -> Path:
    """The directory without symbolic links in its path, once it was found to be out of reach of others.

    Raises:
      FileNotFoundError: there is no such directory.
      UntrustedPath: it, or a directory above it, belongs to another user, or group or others may write to it. Above it
        the sticky bit, as of /tmp, is enough, because others cannot rename what is in there.
    """
    resolved = Path(path).resolve()
    if not resolved.is_dir():
        raise FileNotFoundError(f"no directory {str(path)!r}")
    for directory in (resolved, *resolved.parents):
        status = directory.stat()
        sticky = directory != resolved and status.st_mode & stat.S_ISVTX
        _check(directory, status, writable=bool(sticky))
    return resolved


def read_file(directory: Path, name: str, sha256: str | None = None) -> bytes:
    """The content of a file in a checked directory.

    Raises:
      FileNotFoundError: there is no such file.
      UntrustedPath: the name leads elsewhere, it is no regular file, belongs to another user, or group or others may
        write to it.
      ValueError: the content has another checksum.
    """
    if Path(name).name != name or name in ("", ".", ".."):
        raise UntrustedPath(f"{name!r}: must be a file in {str(directory)!r}")
    file = directory / name
    if file.is_symlink():
        raise UntrustedPath(f"{str(file)!r} is a symbolic link: must be a file")
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
        # Of what was opened, which the name may no longer lead to.
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedPath(f"{str(file)!r} is no regular file")
        _check(file, status)
        content = opened.read()
    if sha256 is not None and (found := digest(content)) != sha256:
        raise ValueError(f"{str(file)!r} is damaged: its SHA-256 is {found}, the manifest says {sha256}")
    return content


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _check(path: Path, status: os.stat_result, writable: bool = False) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedPath(
            f"{str(path)!r} is owned by user {status.st_uid}: must be by {os.geteuid()}, who runs this, or by root"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not writable:
        mode = stat.filemode(status.st_mode)
        raise UntrustedPath(f"{str(path)!r} is writable by others ({mode}): must be by its owner alone, `chmod go-w`")
