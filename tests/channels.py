"""Both ends of a channel in one process, for tests."""

import contextlib
import random
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
    """A port that nobody listens on, as on the one after it; none of those that connections get by themselves."""
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError):
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port


def channel_config(process=0, processes=2, port=0, **options):
    """Frequent signs of life; limits that a slow machine does not run into."""
    times = {"heartbeat_seconds": 0.1, "silence_seconds": 60.0, "call_seconds": 60.0, "start_seconds": 60.0}
    return ChannelConfig(
        "127.0.0.1", port, processes, process, **{"token": TOKEN, "identity": {"model": "a"}, **times, **options}
    )


class Failures(list):
    """Takes what a channel says on failure."""

    def __init__(self):
        self._come = threading.Event()

    def __call__(self, failure):
        self.append(str(failure))
        self._come.set()

    def wait(self) -> str:
        assert self._come.wait(60), "no failure in time"
        return self[0]


@contextlib.contextmanager
def connected(processes=2, strict=None, **options):
    """(leader, followers, failures of each process); all closed afterwards.

    The options hold for all processes, or for the one that is `strict` alone.
    """
    port = free_port()
    failures = [Failures() for _ in range(processes)]
    configs = [channel_config(i, processes, port, **(options if strict in (None, i) else {})) for i in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        kinds = [LeaderChannel] + [FollowerChannel] * (processes - 1)
        made = [pool.submit(kind, *args) for kind, *args in zip(kinds, configs, failures, strict=True)]
        channels = [future.result(60) for future in made]
    try:
        yield channels[0], channels[1:], failures
    finally:
        for channel in channels:
            channel.close()
