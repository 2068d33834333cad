"""One connection between two processes of an engine: what travels on it, and how."""

import contextlib
import enum
import socket
import struct
import threading

_LENGTH = struct.Struct("<Q")
_MAX_BODY = 1 << 32
_PATIENCE = 0.5  # seconds for another thread's message before the last words


class Kind(enum.IntEnum):
    """First byte of everything that is sent; all but heartbeats go on with a length (u64) and a body."""

    HEARTBEAT = 0
    # From process 0, in the order of its executor's calls.
    DISPATCH = 1
    WAIT = 2
    RESET = 3
    SHUTDOWN = 4
    START = 5
    COSTS = 6
    # To process 0.
    READY = 7
    RESET_DONE = 8
    STEP_FAILED = 9
    # Either way: the sender ends, for the reason that is the body.
    END = 10


class Connection:
    """One process at the other end; sends from any thread, reads from one."""

    def __init__(self, connection: socket.socket, process: int, silence_seconds: float):
        self.process = process
        connection.settimeout(silence_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._lock = connection, threading.Lock()
        self._incoming = connection.makefile("rb")
        # Shares the connection but not the time limit.
        self._impatient = connection.dup()
        self._impatient.settimeout(0)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Sends all of it; raises OSError."""
        with self._lock:
            self._socket.sendall(bytes([kind]) + _LENGTH.pack(len(body)) + body)

    def beat(self) -> None:
        """Gives a sign of life without waiting for anything; one byte, so never sent in part."""
        self._send_at_once(bytes([Kind.HEARTBEAT]), 0.0)

    def say_end(self, reason: str) -> None:
        """Says why this process ends, if the other end still takes anything."""
        body = reason.encode()
        self._send_at_once(bytes([Kind.END]) + _LENGTH.pack(len(body)) + body, _PATIENCE)

    def read(self) -> tuple[Kind, bytes]:
        """The next frame that is no heartbeat; raises OSError, TimeoutError after a silence."""
        while (kind := Kind(self._read(1)[0])) is Kind.HEARTBEAT:
            pass
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MAX_BODY:
            raise OSError(f"a frame of {length} bytes")
        return kind, self._read(length)

    def close(self) -> None:
        """Ends it for both ends and every thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._impatient.close()
        self._socket.close()

    def _send_at_once(self, content: bytes, patience: float) -> None:
        if self._lock.acquire(timeout=patience):  # who holds it is sending, which is a sign of life as well
            with contextlib.suppress(OSError):
                self._impatient.send(content)
            self._lock.release()

    def _read(self, size: int) -> bytes:
        content = self._incoming.read(size)
        if len(content) < size:
            raise EOFError
        return content
