"""Checks and exact conversions of stored values."""

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

_CHUNK = 1 << 20
_SCALE_NAN = 255
_E4M3_NAN = 0x7F  # without the sign bit


def find_nan(stored: str, values: Shaped[np.ndarray, "..."]) -> tuple[int, ...] | None:
    """Index of the first NaN code in `values`, at least one-dimensional and of the quantised safetensors type `stored`.

    None if there is none, or for a type without scales.
    """
    if stored not in ("F8_E8M0", "F8_E4M3"):
        return None
    rows = max(1, _CHUNK // max(1, values[:1].size))
    for start in range(0, values.shape[0], rows):
        codes = values[start : start + rows].view(np.uint8)
        nan = _SCALE_NAN
        if stored == "F8_E4M3":
            codes, nan = codes & 0x7F, _E4M3_NAN
        if codes.size and codes.max() == nan:
            row, *rest = (int(i) for i in np.argwhere(codes == nan)[0])
            return (start + row, *rest)
    return None


def convert_exactly(
    name: str, values: Shaped[np.ndarray, "..."], dtype: np.dtype, first: tuple[int, ...]
) -> Shaped[np.ndarray, "..."]:
    """BF16 as F32 or F32 as BF16, bit for bit; other types must agree already.

    Args:
      name: the tensor, for the message.
      values: a part of it.
      dtype: type wanted.
      first: index of the part's first element in the tensor.

    Raises:
      ValueError: an F32 value has no BF16 form; names the tensor and the index.
    """
    bfloat16, float32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
    if values.dtype == dtype:
        return values
    values = np.ascontiguousarray(values)
    if (values.dtype, dtype) == (bfloat16, float32):
        return (values.view(np.uint16).astype(np.uint32) << 16).view(float32)
    if (values.dtype, dtype) != (float32, bfloat16):
        raise TypeError(f"tensor {name!r}: {values.dtype} cannot become {dtype}")
    bits = values.view(np.uint32)
    inexact = bits & 0xFFFF != 0
    if inexact.any():
        found = np.argwhere(inexact)[0]
        raise ValueError(
            f"tensor {name!r}: stored as F32 but declared BF16, and {values[tuple(found)]} at"
            f" {(found + np.array(first, int)).tolist()} has no BF16 form"
        )
    return (bits >> 16).astype(np.uint16).view(bfloat16)
