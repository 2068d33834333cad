"""Waiting for what happens elsewhere, for as long as it may take on a slow machine."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object]) -> None:
    """Returns once the condition holds; half of the minute that 3,000 tokens of the fake engine take is too long."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)
