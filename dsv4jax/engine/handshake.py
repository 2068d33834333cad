"""How the processes of one engine recognise each other: the same secret token, the same program.

Both ends prove that they know the token over random numbers of both, so that nothing can be replayed. What follows on
the connection is neither encrypted nor signed: like the traffic of the devices it belongs on a network of its own.
"""

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

_GREETING = b"dsv4jax\x01"  # the last byte is the version of everything that is said on the connection
_NONCE = 32  # bytes, of each end
_MAC = 32
_LENGTH = struct.Struct("<I")
_MAX_HELLO = 1 << 16
_SECONDS = 5.0  # for all of it


class HandshakeError(Exception):
    """The other end is none of this engine's processes, or does not know the token."""


class Mismatch(ValueError):
    """The other end knows the token, but was started as something else."""


def check_token(token: str) -> None:
    """Raises ValueError for a token that could be guessed; does not repeat it."""
    if len(token) < 16:
        raise ValueError(f"token: must hold at least 16 characters, has {len(token)}")


def welcome(
    connection: socket.socket, token: str, identity: Mapping[str, str], allowed: Callable[[int], str | None]
) -> int:
    """Process 0's side: the number of the process behind a new connection.

    Args:
      identity: name to value of everything that must be the same in all processes.
      allowed: why a process of this number cannot be taken now, None if it can.

    Raises:
      HandshakeError, OSError: to be ignored, whoever it was.
      Mismatch: one of the processes was started with other settings; it was told as well.
    """
    deadline = time.monotonic() + _SECONDS
    nonce = secrets.token_bytes(_NONCE)
    _send(connection, _GREETING + nonce, deadline)
    other = _receive(connection, _NONCE, deadline)
    try:
        hello = _read(connection, token, b"hello" + nonce + other, deadline)
    except HandshakeError:
        _say(connection, token, b"answer" + nonce + other, {"refused": "another token"}, deadline)
        raise
    problem = allowed(hello["process"]) or _difference(hello["process"], hello["identity"], identity)
    _say(connection, token, b"answer" + nonce + other, {"refused": problem}, deadline)
    if problem:
        raise Mismatch(problem)
    return hello["process"]


def introduce(connection: socket.socket, token: str, identity: Mapping[str, str], process: int) -> None:
    """The other processes' side.

    Raises:
      HandshakeError: there is something else at this address, or it has another token.
      Mismatch: process 0 was started with other settings.
      OSError: the connection broke.
    """
    deadline = time.monotonic() + _SECONDS
    greeting = _receive(connection, len(_GREETING), deadline)
    if greeting != _GREETING:
        raise HandshakeError(f"greeted with {greeting!r} in place of {_GREETING!r}: another version or no process 0")
    other, nonce = _receive(connection, _NONCE, deadline), secrets.token_bytes(_NONCE)
    _send(connection, nonce, deadline)
    hello = {"process": process, "identity": dict(identity)}
    _say(connection, token, b"hello" + other + nonce, hello, deadline)
    answer = _read(connection, token, b"answer" + other + nonce, deadline)
    if answer["refused"]:
        raise Mismatch(answer["refused"])


def _difference(process: int, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str | None:
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            return f"{name}: process {process} has {theirs.get(name)!r}, process 0 has {ours.get(name)!r}"
    return None


def _say(connection: socket.socket, token: str, purpose: bytes, content: Any, deadline: float) -> None:
    body = json.dumps(content).encode()
    mac = hmac.digest(token.encode(), purpose + body, "sha256")
    _send(connection, _LENGTH.pack(len(body)) + mac + body, deadline)


def _read(connection: socket.socket, token: str, purpose: bytes, deadline: float) -> Any:
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline))
    if length > _MAX_HELLO:
        raise HandshakeError(f"a hello of {length} bytes: at most {_MAX_HELLO} are allowed")
    mac, body = _receive(connection, _MAC, deadline), _receive(connection, length, deadline)
    if not hmac.compare_digest(mac, hmac.digest(token.encode(), purpose + body, "sha256")):
        raise HandshakeError("not signed with this token")
    return json.loads(body)


def _send(connection: socket.socket, content: bytes, deadline: float) -> None:
    connection.settimeout(max(1e-3, deadline - time.monotonic()))
    connection.sendall(content)


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    content = b""
    while len(content) < size:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(size - len(content))
        if not part:
            raise ConnectionError("closed during the handshake")
        content += part
    return content
