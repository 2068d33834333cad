"""Sampling settings of one request, checked when they are made; numpy only."""

import dataclasses
import functools
import numbers

import numpy as np

MAX_TOP_LOGPROBS = 20
MAX_PAUSE_TOKENS = 2
"""Of a request: tokens behind which its allowed tokens may change, so that the host has to see them first."""
SETTINGS_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("seed", np.uint32, 2),
        ("top_logprobs", np.int32),
        ("seeded", bool),
    ]
)
"""Settings as the device reads them: the seed as the high and low half of its 64 bits, 0 without a seed."""
_FLOAT32 = np.finfo(np.float32)


@dataclasses.dataclass(frozen=True)
class RequestSampling:
    """Sampling settings of one request; the defaults sample from the model's own distribution.

    Raises ValueError on construction for a value of the wrong type, NaN, or outside the range below.
    """

    temperature: float = 1.0  # 0 .. 2; 0 = greedy
    top_k: int = 0  # 0 .. 2**31 - 1; 0 = no limit
    top_p: float = 1.0  # above 0, to 1; 1 = off
    min_p: float = 0.0  # 0 .. 1; 0 = off
    presence_penalty: float = 0.0  # -2 .. 2
    frequency_penalty: float = 0.0  # -2 .. 2
    repetition_penalty: float = 1.0  # above 0, a normal float32; 1 = off
    seed: int | None = None  # any int64; None = fresh randomness
    top_logprobs: int = -1  # -1 .. MAX_TOP_LOGPROBS

    def __post_init__(self):
        check_number("temperature", self.temperature, 0.0, 2.0)
        check_integer("top_k", self.top_k, 0, 2**31 - 1)
        check_number("top_p", self.top_p, 0.0, 1.0, low_allowed=False)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, float(_FLOAT32.tiny), float(_FLOAT32.max))
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        check_integer("top_logprobs", self.top_logprobs, -1, MAX_TOP_LOGPROBS)

    @functools.cached_property
    def row(self) -> bytes:
        """The bytes of one `SETTINGS_ROW`; made once, because every step stacks the rows of its requests."""
        seed = 0 if self.seed is None else int(self.seed) % 2**64
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {"seed": (seed >> 32, seed & 0xFFFFFFFF), "seeded": self.seed is not None}
        return np.array(tuple(values[name] for name in SETTINGS_ROW.names), SETTINGS_ROW).tobytes()


def check_number(name: str, value: object, low: float, high: float, low_allowed: bool = True) -> None:
    """Raises ValueError unless the value is a number from `low` (or above it) to `high`; NaN and bool are not."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and low <= value <= high and (low_allowed or value > low)):  # NaN fails the comparison
        bound = "at least" if low_allowed else "above"
        raise ValueError(f"{name} must be a number {bound} {low} and at most {high}, got {value!r}")


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raises ValueError unless the value is an integer from `low` to `high`; bool is not."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (is_integer and low <= value <= high):
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
