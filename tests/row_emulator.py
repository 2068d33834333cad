"""Runs per-thread code on rows (see pallas_kernels.rows) on NumPy, block after block."""

import ml_dtypes
import numpy as np
import simt_emulator

from pallas_kernels import rows

BF16 = ml_dtypes.bfloat16


class Machine(simt_emulator.Machine):
    """The emulator with the conversions of `rows.Machine`."""

    def rsqrt(self, x):
        return np.float32(1) / np.sqrt(x)

    def pack_bf16(self, low, high):
        pair = np.stack(np.broadcast_arrays(low, high), -1).astype(BF16)
        return pair.view(np.uint32)[:, 0]

    def pack_e4m3(self, values):
        x = np.clip(np.stack(np.broadcast_arrays(*values), -1), -448, 448)
        return x.astype(ml_dtypes.float8_e4m3fn).view(np.uint32)[:, 0]

    def unpack_e4m3(self, byte):
        return byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

    def pack_f16(self, low, high):
        return np.stack([low, high], -1).astype(np.float16).view(np.uint32)[:, 0]

    def divide(self, x, by):
        return x // np.uint32(by), x % np.uint32(by)

    def maximum(self, x, y):
        return np.fmax(x, y)

    def exchange(self, x, distance):
        return self._warps(x)[:, np.arange(32) ^ distance].reshape(-1)

    def inverse(self, x):
        return np.float32(1) / x

    def exp2(self, x):
        return np.exp2(x)

    def add(self, x, y):
        return x + y

    def row(self, ref, row, width):
        (row,) = set(np.broadcast_to(row, self.threads).tolist())
        return simt_emulator.Array(ref.data[row * width : (row + 1) * width])

    def store_byte(self, ref, index, value):
        self.store(simt_emulator.Array(ref.data.view(np.uint8)), index, value.astype(np.uint8))


def array(x):
    """A JAX or NumPy array in the memory of the emulator: fp32 as it is, everything else as words."""
    x = np.ascontiguousarray(x).reshape(-1)
    return simt_emulator.Array(x.copy() if x.dtype == np.float32 else x.view(np.uint32).copy())


def emulate(code, number, arguments, results, channels, cache=None, places=None):
    """Runs the code of a kernel for each row; results are arrays to be filled. Returns cache and results as bytes."""
    threads = -(-channels // rows.CHANNELS // 128) * 128
    inputs = [array(x) for x in arguments]
    outputs = [array(x) for x in results]
    target = None if cache is None else (array(cache), np.uint32(cache.shape[0] * cache.shape[1]), array(places))
    for row in range(number):
        m = Machine(threads)
        sums = simt_emulator.Array(np.full(threads // 16, np.nan, np.float32))
        with np.errstate(over="ignore", invalid="ignore"):
            code(m, m.u32(row), *inputs, target, *outputs, sums)
    found = [o.data.view(np.uint8) for o in outputs]
    return (None if cache is None else target[0].data.view(np.uint8).reshape(cache.shape)), found
