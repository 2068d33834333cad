"""Runs the per-thread code of a hyper-connection site on NumPy, the blocks of a group in host threads."""

import threading

import ml_dtypes
import numpy as np
import row_emulator
import simt_emulator
from row_emulator import array

from pallas_kernels.hyper_connections import site


class Machine(row_emulator.Machine):
    """The emulator with the operations of `hyper_connections.device.Machine`."""

    def store4(self, ref, index, values):
        assert np.all(index[self.mask] % 4 == 0)
        for i, value in enumerate(values):
            self.store(ref, index + np.uint32(i), value)

    def copy_fours(self, to, index, source, at, offsets):
        for a, b in offsets:
            self.store4(to, index + np.uint32(a), self.load4(source, at + np.uint32(b)))

    def wait_for_copies(self, after):
        assert not np.any(after < 0)

    def multiply(self, a, b, c):
        def pairs(word):
            return self._warps(word).view(ml_dtypes.bfloat16).reshape(-1, 8, 4, 2)

        left, right = np.empty((self.threads // 32, 16, 16)), np.empty((self.threads // 32, 16, 8))
        total = np.empty((self.threads // 32, 16, 8))
        for i, word in enumerate(a):
            rows, channels = slice(i % 2 * 8, i % 2 * 8 + 8), slice(i // 2 * 8, i // 2 * 8 + 8)
            left[:, rows, channels] = pairs(word).reshape(-1, 8, 8)
        for i, word in enumerate(b):
            right[:, 8 * i : 8 * i + 8] = pairs(word).reshape(-1, 8, 8).swapaxes(1, 2)
        for i, value in enumerate(c):
            total[:, i // 2 * 8 : i // 2 * 8 + 8, i % 2 :: 2] = self._warps(value).reshape(-1, 8, 4)
        total = (np.einsum("wmk,wkn->wmn", left, right) + total).astype(np.float32)
        return [total[:, i // 2 * 8 : i // 2 * 8 + 8, i % 2 :: 2].reshape(-1) for i in range(4)]

    def fma(self, x, y, z):
        return (x.astype(np.float64) * y + z).astype(np.float32)

    def exp(self, x):
        return np.exp(x)

    def arrive(self, counters, index):
        self.sync()
        self._count(counters, index)

    def wait(self, counters, index, blocks):
        self.cluster.wait()
        assert counters.data[index[0]] == blocks
        self.cluster.wait()

    def leave(self, counters, index, blocks):
        assert self.mask.sum() == 1
        if self._count(counters, index) == 2 * blocks:
            counters.data[index[0]] = 0

    def _count(self, counters, index):
        with counters.lock:
            counters.data[index[0]] += 1
            return counters.data[index[0]]


def emulate_site(residual, weights, cfg):
    """What the kernel returns: streams, x, (elements, scales), (pre, post, residual)."""
    rows, n, hidden = residual.streams.shape
    shape = site.Shape(rows, hidden)
    groups = -(-rows // site.GROUP)
    padded = groups * site.GROUP
    bf16, fp8, f32 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32
    results = {
        "new_streams": ((rows, n, hidden), bf16),
        "x": ((rows, hidden), bf16),
        "elements": ((rows, hidden), fp8),
        "scales": ((hidden // 32, rows), f32),
        "new_pre": ((rows, n), f32),
        "new_post": ((rows, n), f32),
        "new_residual": ((rows, n, n), f32),
        "projection": ((padded, shape.slices, site.MIXES), f32),
        "squares": ((padded, shape.slices), f32),
        "collapsed_squares": ((padded, shape.slices), f32),
    }
    made = {name: array(np.full(size, np.nan, kind)) for name, (size, kind) in results.items()}
    mix = residual.mix
    given = {"streams": residual.streams, "output": residual.output, "pre": mix.pre, "post": mix.post}
    given |= {"residual": mix.residual, "fn": weights.fn, "base": weights.base, "scale": weights.scale}
    given = {name: array(value) for name, value in (given | {"norm": weights.norm}).items()}
    counters = array(np.zeros(groups, np.int32))
    counters.lock = threading.Lock()

    def block(number, machine):
        m = Machine(site.THREADS, machine.cluster)
        shared = array(np.full(site.FN_WORDS, 0xFFFFFFFF, np.uint32)), array(np.full(site.SUM_WORDS, np.nan, f32))
        arrays = site.Arrays(**given, counters=counters, **made, weights=shared[0], sums=shared[1])
        with np.errstate(over="ignore", invalid="ignore"):
            site.run_site(m, arrays, shape, cfg, m.u32(number))

    for group in range(groups):
        first = group * shape.slices
        simt_emulator.run_cluster(
            shape.slices, site.THREADS, lambda machine, rank, first=first: block(first + rank, machine)
        )
    assert not counters.data.any(), "the counters must be zero for the next call"
    streams, x, elements, scales, pre, post, new = (
        made[name].data.view(kind).reshape(size) for name, (size, kind) in list(results.items())[:7]
    )
    return streams, x, (elements, scales), (pre, post, new)
