"""Both ends of a channel in one process, for tests."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from dsv4jax.engine.channel import ChannelConfig, FollowerChannel, LeaderChannel
from dsv4jax.engine.replay import ReplayRule
from dsv4jax.engine.scheduler import SchedulerConfig

TOKEN = "0123456789abcdef"
TWO_RANKS = SchedulerConfig(
    slots=4,
    pages=16,
    max_model_len=64,
    eos_id=1,
    replay=ReplayRule(window=6, layers=2, mode="bounded"),
    ranks=2,
    page_size=4,
    prefill_tokens=16,
    prefill_requests=3,
    tile=2,
)


def free_port() -> int:
    """A port that nobody listens on, as on the one after it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", port + 1)):
                return port


def channel_config(process=0, processes=2, port=0, **options):
    """Limits in tenths of a second."""
    options = {"token": TOKEN, "identity": {"model": "a"}, "start_seconds": 10.0, **options}
    times = {"heartbeat_seconds": 0.1, "silence_seconds": 1.0, "call_seconds": 5.0}
    return ChannelConfig("127.0.0.1", port, processes, process, **{**times, **options})


class Failures(list):
    """Takes what a channel says on failure."""

    def __init__(self):
        self._come = threading.Event()

    def __call__(self, failure):
        self.append(str(failure))
        self._come.set()

    def wait(self, seconds=10.0) -> str:
        assert self._come.wait(seconds), "no failure in time"
        return self[0]


@contextlib.contextmanager
def connected(processes=2, **options):
    """(leader, followers, failures of each process); all closed afterwards."""
    port = free_port()
    failures = [Failures() for _ in range(processes)]
    configs = [channel_config(i, processes, port, **options) for i in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        kinds = [LeaderChannel] + [FollowerChannel] * (processes - 1)
        made = [pool.submit(kind, *args) for kind, *args in zip(kinds, configs, failures, strict=True)]
        channels = [future.result(20) for future in made]
    try:
        yield channels[0], channels[1:], failures
    finally:
        for channel in channels:
            channel.close()
