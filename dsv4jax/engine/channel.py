"""The connections between the processes of one engine: commands from process 0 to all others, trouble both ways.

Every connection carries a sign of life at least every `heartbeat_seconds`. A process that dies, stops or hangs is
noticed by the others' threads whatever their main threads wait for, be it a step that will never end. There is no way
back from that, because JAX cannot take a process back into its cluster: the channel fails for good, every process is
told why, and all end, to be started again together.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from dsv4jax.engine.connection import Connection, Kind
from dsv4jax.engine.handshake import HandshakeError, Mismatch, check_token, introduce, welcome

FAILURE_EXIT_CODE = 75
"""Of a process that ends because its engine lost a process or a step hung (EX_TEMPFAIL: start it again)."""

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.2
_LAST_WORDS_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class ChannelConfig:
    """Who belongs to an engine, and how long anything may take.

    Args:
      host, port: where process 0 listens.
      processes: of the engine.
      process: number of this one.
      token: secret that all of them were given.
      identity: name to value of everything else that must be the same in all of them.
      heartbeat_seconds: a sign of life is sent this often.
      silence_seconds: a process that sends none for so long, or takes nothing that is sent to it, counts as dead.
      call_seconds: a step, or whatever else is under `watch`, that takes longer counts as hanging.
      start_seconds: until all processes must be connected.

    Raises:
      ValueError: a field is out of range.
    """

    host: str
    port: int
    processes: int
    process: int
    token: str = dataclasses.field(repr=False)
    identity: Mapping[str, str]
    heartbeat_seconds: float = 1.0
    silence_seconds: float = 10.0
    call_seconds: float = 60.0
    start_seconds: float = 300.0

    def __post_init__(self):
        check_token(self.token)
        if self.processes < 2:
            raise ValueError(f"processes = {self.processes}: must be at least 2")
        if not 0 <= self.process < self.processes:
            raise ValueError(f"process = {self.process}: must be from 0 to {self.processes - 1}")
        for name in ("heartbeat_seconds", "call_seconds", "start_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0")
        if self.silence_seconds < 3 * self.heartbeat_seconds:
            raise ValueError(
                f"silence_seconds = {self.silence_seconds}: must be at least 3 heartbeats of {self.heartbeat_seconds} s"
            )

    @property
    def same(self) -> dict[str, str]:
        """What the processes compare when they meet."""
        return {**self.identity, "processes": str(self.processes)}


class ChannelFailure(Exception):
    """A process is lost, a step hangs or processes disagree: the engine cannot go on."""


def end_process(failure: ChannelFailure) -> None:
    """Ends this process at once with `FAILURE_EXIT_CODE`, whatever its threads are doing."""
    print(f"error: {failure}; ending, all processes of the engine must be started again", file=sys.stderr, flush=True)
    os._exit(FAILURE_EXIT_CODE)


class _Channel:
    """What both ends share: threads that read and watch, and one failure that ends everything."""

    def __init__(self, config: ChannelConfig, on_failure: Callable[[ChannelFailure], None]):
        self.config = config
        self.failure: ChannelFailure | None = None
        self._on_failure = on_failure
        self._connections: dict[int, Connection] = {}
        self._news = threading.Condition()  # for whoever waits for another process
        self._ended = threading.Event()  # nothing is sent any more
        self._closed = False  # and everybody knows
        self._watched: tuple[str, float, float] | None = None
        threading.Thread(target=self._monitor, name="channel-monitor", daemon=True).start()

    @contextlib.contextmanager
    def watch(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """Fails the channel if the body takes longer than `seconds` or `call_seconds`. For one thread, not nested."""
        seconds = self.config.call_seconds if seconds is None else seconds
        self._watched = what, seconds, time.monotonic() + seconds
        try:
            yield
        finally:
            self._watched = None

    def fail(self, reason: str) -> ChannelFailure:
        """Ends the channel, tells the other processes why and calls `on_failure`; an earlier failure stays."""
        with self._news:
            first = not self._ended.is_set()
            if first:
                self.failure = ChannelFailure(f"process {self.config.process}: {reason}")
                self._ended.set()
        if first:
            _log.error("%s", self.failure)
            self._say_end(str(self.failure))
            self._on_failure(self.failure)  # before it wakes anybody: it may well end the process
            self._close_connections()
        return self._ending()

    def fail_unless_lost(self, reason: str) -> ChannelFailure:
        """As `fail`, but for a lost process if one is noticed now: it fails the steps of others, which may be heard of
        first."""
        self._ended.wait(_LAST_WORDS_SECONDS)
        return self.fail(reason)

    def close(self, reason: str | None = None) -> None:
        """Ends the connections without a failure here; with a reason the other processes fail for it."""
        self._ended.set()
        if reason is not None:
            self._say_end(reason)
        self._close_connections()

    def _ending(self) -> ChannelFailure:
        """Why nothing is sent any more, once `on_failure` and the other processes have been told: the process may end
        with that, and not with the exception of a thread that comes upon it meanwhile."""
        with self._news:
            while not self._closed:
                self._news.wait()
        return self.failure or ChannelFailure(f"process {self.config.process}: the channel is closed")

    def _send(self, connection: Connection, kind: Kind, body: bytes = b"") -> None:
        if self._ended.is_set():
            raise self._ending()
        try:
            connection.send(kind, body)
        except OSError as error:
            if not isinstance(error, TimeoutError):
                # Who has closed its end has said why, and the reading thread is about to tell.
                self._ended.wait(self.config.silence_seconds)
            raise self.fail(self._lost(connection.process, error)) from error

    def _add(self, connection: Connection) -> None:
        self._connections[connection.process] = connection
        name = f"channel-to-{connection.process}"
        threading.Thread(target=self._read, args=(connection,), name=name, daemon=True).start()

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                kind, body = connection.read()
                if kind is Kind.END:
                    self._left(connection.process)
                    self.fail(f"process {connection.process} has ended: {body.decode()}")
                else:
                    self._received(connection.process, kind, body)
        except Exception as error:  # whatever it is, nobody reads any more
            self._left(connection.process)
            self.fail(self._lost(connection.process, error))

    def _received(self, process: int, kind: Kind, body: bytes) -> None:
        """Takes a message; each end of the channel has its own."""
        raise NotImplementedError

    def _left(self, process: int) -> None:
        """Called when nothing more will come."""

    def _lost(self, process: int, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"process {process} gave no sign of life for {self.config.silence_seconds:g} s"
        if isinstance(error, EOFError | ConnectionError):
            return f"process {process} is gone: its connection was closed"
        return f"the connection to process {process} broke: {error}"

    def _monitor(self) -> None:
        while not self._ended.wait(self.config.heartbeat_seconds):
            for connection in list(self._connections.values()):
                connection.beat()
            watched = self._watched
            if watched is not None and time.monotonic() > watched[2]:
                self.fail(f"{watched[0]} has not ended within {watched[1]:g} s")
            self._check()

    def _check(self) -> None:
        """Called with every heartbeat."""

    def _say_end(self, reason: str) -> None:
        for connection in list(self._connections.values()):
            connection.say_end(reason)

    def _close_connections(self) -> None:
        for connection in list(self._connections.values()):
            connection.close()
        with self._news:
            self._closed = True
            self._news.notify_all()


class LeaderChannel(_Channel):
    """Process 0's end."""

    def __init__(self, config: ChannelConfig, on_failure: Callable[[ChannelFailure], None]):
        """Waits until every other process is connected.

        Args:
          on_failure: called once, by whichever thread notices; `end_process` in a program of its own.

        Raises:
          Mismatch: a process was started with other settings; names the first that differs.
          TimeoutError: not all processes came in time; names those missing.
          OSError: the address cannot be listened on.
          ChannelFailure: a process came and was lost again.
        """
        if config.process != 0:
            raise ValueError(f"process = {config.process}: only process 0 leads")
        self._acknowledged: dict[Kind, set[int]] = {Kind.READY: set(), Kind.RESET_DONE: set()}
        self._step_failed: dict[int, tuple[str, float]] = {}  # by process: why and when, until it is reset
        self._resetting = False
        self._gone: set[int] = set()
        with _listen(config.host, config.port) as listener:
            super().__init__(config, on_failure)
            try:
                self._accept(listener)
            except Exception as error:
                self.close(f"process 0: {error}")
                raise

    def meet(self) -> None:
        """Returns when every process has called this, however long that takes; raises ChannelFailure."""
        self.wait_for_all(Kind.READY)
        self.broadcast(Kind.START)

    def broadcast(self, kind: Kind, body: bytes = b"") -> None:
        """Sends to all.

        Raises:
          ChannelFailure: a process is lost, or a step failed there and not here.
        """
        if kind is Kind.RESET:
            self._acknowledged[Kind.RESET_DONE].clear()
            self._resetting = True
        elif self._step_failed:
            raise self.fail_unless_lost(self._failed_alone())
        for connection in self._connections.values():
            self._send(connection, kind, body)

    def wait_for_all(self, kind: Kind) -> None:
        """Until every process has said READY or RESET_DONE; raises ChannelFailure."""
        with self._news:
            while not self._closed and len(self._acknowledged[kind]) < self.config.processes - 1:
                self._news.wait()
        if self._closed:
            raise self._ending()
        if kind is Kind.RESET_DONE:
            self._resetting = False

    def shutdown(self) -> None:
        """Ends all processes' loops; waits until they have closed their ends, `silence_seconds` at most."""
        if self.failure is not None:
            raise self.failure
        self._ended.set()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(Kind.SHUTDOWN)
        self._wait_until_gone(self.config.silence_seconds)
        self._close_connections()

    def _accept(self, listener: socket.socket) -> None:
        config = self.config
        end = time.monotonic() + config.start_seconds
        while len(self._connections) < config.processes - 1:
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > end:
                missing = sorted({*range(1, config.processes)} - self._connections.keys())
                raise TimeoutError(f"processes {missing} did not connect within {config.start_seconds:g} s")
            try:
                connection, address = listener.accept()
            except TimeoutError:
                continue
            try:
                process = welcome(connection, config.token, config.same, self._refusal)
            except Mismatch:
                connection.close()
                raise
            except (HandshakeError, OSError) as error:
                _log.warning("turned away a connection from %s: %s", address[0], error)
                connection.close()
                continue
            self._add(Connection(connection, process, config.silence_seconds))

    def _refusal(self, process: int) -> str | None:
        if not 1 <= process < self.config.processes:
            return f"process = {process}: must be from 1 to {self.config.processes - 1}"
        return f"process = {process}: is connected already" if process in self._connections else None

    def _received(self, process: int, kind: Kind, body: bytes) -> None:
        with self._news:
            if kind is Kind.STEP_FAILED:
                self._step_failed[process] = body.decode(), time.monotonic()
                return
            if kind is Kind.RESET_DONE:
                self._step_failed.pop(process, None)
            self._acknowledged[kind].add(process)
            self._news.notify_all()

    def _left(self, process: int) -> None:
        with self._news:
            self._gone.add(process)
            self._news.notify_all()

    def _say_end(self, reason: str) -> None:
        super()._say_end(reason)
        # They end before this process does: JAX aborts a process whose process 0 is gone, with a code of its own.
        self._wait_until_gone(_LAST_WORDS_SECONDS)

    def _wait_until_gone(self, seconds: float) -> None:
        with self._news:
            self._news.wait_for(lambda: self._gone >= self._connections.keys(), seconds)

    def _check(self) -> None:
        # What has failed there may be about to fail here: then all are reset together.
        oldest = min((at for _, at in list(self._step_failed.values())), default=None)
        if oldest is not None and not self._resetting and time.monotonic() > oldest + self.config.silence_seconds:
            self.fail(self._failed_alone())

    def _failed_alone(self) -> str:
        process, (why, _) = next(iter(self._step_failed.items()))
        return f"a step failed on process {process} and not here: {why}"


class FollowerChannel(_Channel):
    """The end of every other process."""

    def __init__(self, config: ChannelConfig, on_failure: Callable[[ChannelFailure], None]):
        """Connects to process 0, which may start later.

        Raises:
          Mismatch: process 0 was started with other settings; names the first that differs.
          HandshakeError: something else listens there, or the token is another.
          TimeoutError: nobody took the connection in time.
        """
        if config.process == 0:
            raise ValueError("process = 0: process 0 leads")
        self._commands: collections.deque[tuple[Kind, bytes]] = collections.deque()
        connection = _connect(config)
        super().__init__(config, on_failure)
        self._add(Connection(connection, 0, config.silence_seconds))

    def meet(self) -> None:
        """Returns when every process has called this, however long that takes; raises ChannelFailure."""
        self.send(Kind.READY)
        if (kind := self.receive()[0]) is not Kind.START:
            raise self.fail(f"process 0 sent {kind.name} before START")

    def receive(self) -> tuple[Kind, bytes]:
        """What process 0 has sent next, with its body; raises ChannelFailure."""
        with self._news:
            while not self._closed and not self._commands:
                self._news.wait()
        if self.failure is not None or not self._commands:
            raise self._ending()
        return self._commands.popleft()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Tells process 0: READY, RESET_DONE or STEP_FAILED; raises ChannelFailure."""
        self._send(self._connections[0], kind, body)

    def _received(self, process: int, kind: Kind, body: bytes) -> None:
        with self._news:
            if kind is Kind.SHUTDOWN:
                self._ended.set()
            self._commands.append((kind, body))
            self._news.notify_all()


@contextlib.contextmanager
def open_channel(
    config: ChannelConfig, on_failure: Callable[[ChannelFailure], None]
) -> Iterator[LeaderChannel | FollowerChannel]:
    """This process's end of the channel, once it is connected.

    Where process 0 leaves the block the other processes' loops end; where any process leaves it with an error, all fail
    with that for a reason. Raises what the two classes raise.
    """
    channel = (FollowerChannel if config.process else LeaderChannel)(config, on_failure)
    try:
        yield channel
        if isinstance(channel, LeaderChannel):
            channel.shutdown()
    except BaseException as error:
        channel.close(f"process {config.process}: {type(error).__name__}: {error}")
        raise
    channel.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.settimeout(_RETRY_SECONDS)
    return listener


def _connect(config: ChannelConfig) -> socket.socket:
    end = time.monotonic() + config.start_seconds
    while True:
        try:
            connection = socket.create_connection((config.host, config.port), timeout=config.silence_seconds)
        except OSError as error:
            problem = error
        else:
            try:
                introduce(connection, config.token, config.same, config.process)
                return connection
            except OSError as error:
                connection.close()
                problem = error
            except Exception:
                connection.close()
                raise
        if time.monotonic() > end:
            raise TimeoutError(
                f"no process 0 at {config.host}:{config.port} within {config.start_seconds:g} s: {problem}"
            )
        time.sleep(_RETRY_SECONDS)
