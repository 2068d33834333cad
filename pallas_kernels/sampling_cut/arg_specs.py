"""Sizes of the released model, rows of decode steps, and what they ask for, for tests and benchmarks."""

import numpy as np
from jaxtyping import Float32, Int32

VOCAB = 129_280

ROWS = (16, 96, 384)

ASKED = ("nothing", "all", "a mix")


def limits(rows: int, asked: str) -> tuple[Int32[np.ndarray, " rows"], Float32[np.ndarray, " rows"]]:
    """top_k and top_p of each row: 20 and 0.95 in all rows, in none, or both, either and neither in turn."""
    row = np.arange(rows)
    with_k, with_p = {"nothing": (row < 0, row < 0), "all": (row >= 0, row >= 0), "a mix": (row % 2 > 0, row % 4 > 1)}[
        asked
    ]
    return np.where(with_k, 20, 0).astype(np.int32), np.where(with_p, 0.95, 1.0).astype(np.float32)
