"""Runs per-thread kernel code (see pallas_kernels.topk.simt) on NumPy: all threads of a block in lockstep.

Divergent branches run under a mask. Barriers need no action, but all threads must reach them. The blocks of a cluster
run in host threads that wait for each other at cluster barriers; `peer` names another block's shared memory.
"""

import threading
from contextlib import contextmanager

import numpy as np


class Array:
    """Shared or global memory; `peers` are the same array in the blocks of the cluster."""

    def __init__(self, data, peers=None):
        self.data = data
        self.peers = peers


class Machine:
    def __init__(self, threads, cluster=None):
        self.threads = threads
        self.tid = np.arange(threads, dtype=np.uint32)
        self.lane = self.tid % np.uint32(32)
        self.warp = self.tid // np.uint32(32)
        self.mask = np.ones(threads, bool)
        self.cluster = cluster
        self.barriers = 0

    def u32(self, value):
        return np.full(self.threads, value, np.uint32)

    def f32(self, value):
        return np.full(self.threads, value, np.float32)

    def bits(self, x):
        return np.asarray(x, np.float32).view(np.uint32)

    def floats(self, x):
        return np.asarray(x, np.uint32).view(np.float32)

    def where(self, condition, x, y):
        return np.where(condition, x, y)

    def popcount(self, x):
        return np.bitwise_count(x).astype(np.uint32)

    def bit_length(self, x):
        return np.ceil(np.log2(x.astype(np.float64) + 1)).astype(np.uint32)

    def _index(self, index):
        return np.broadcast_to(np.asarray(index, np.int64), self.threads)

    def load(self, ref, index):
        index = self._index(index)
        assert np.all((0 <= index[self.mask]) & (index[self.mask] < ref.data.size)), "load out of bounds"
        return ref.data[np.clip(index, 0, ref.data.size - 1)]

    def load4(self, ref, index):
        assert np.all(index % 4 == 0)
        return [self.load(ref, index + np.uint32(i)) for i in range(4)]

    def store(self, ref, index, value):
        index = self._index(index)[self.mask]
        assert np.all((0 <= index) & (index < ref.data.size)), "store out of bounds"
        value = np.broadcast_to(value, self.threads)[self.mask]
        order = np.argsort(index, kind="stable")
        same = index[order][1:] == index[order][:-1]
        assert np.all(value[order][1:][same] == value[order][:-1][same]), "threads store different values in one place"
        ref.data[index] = value

    def atomic_add(self, ref, index, value):
        index, value = self._index(index), np.broadcast_to(value, self.threads)
        before = self.u32(0)
        for t in np.random.permutation(np.flatnonzero(self.mask)):
            before[t] = ref.data[index[t]]
            ref.data[index[t]] += value[t]
        return before

    def warp_atomic_add(self, ref, index, value):
        before = self.u32(0)
        starts = np.flatnonzero(self.lane == 0)
        for w in np.random.permutation(len(starts)):
            t = slice(starts[w], starts[w] + 32)
            if self.mask[t].any():
                assert self.mask[t].all() and (value[t] == value[starts[w]]).all()
                before[t] = ref.data[self._index(index)[starts[w]]]
                ref.data[self._index(index)[starts[w]]] += value[starts[w]]
        return before

    def peer(self, ref, rank):
        return Array(ref.peers[rank])

    def _warps(self, x):
        self._whole_warps()
        return np.broadcast_to(x, self.threads).reshape(-1, 32)

    def _whole_warps(self):
        masks = self.mask.reshape(-1, 32)
        assert np.all(masks.all(1) == masks.any(1)), "part of a warp in a warp operation"

    def ballot(self, predicate):
        votes = (self._warps(predicate).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1)
        return np.repeat(votes.astype(np.uint32), 32)

    def any(self, predicate):
        return np.repeat(self._warps(predicate).any(1), 32)

    def broadcast(self, x, lane):
        return np.repeat(self._warps(x)[:, lane], 32)

    def shift_up(self, x, distance):
        y = self._warps(x).copy()
        y[:, distance:] = self._warps(x)[:, :-distance]
        return y.reshape(-1)

    def reduce(self, x, kind):
        f = {"add": np.sum, "umin": np.min, "umax": np.max}[kind]
        return np.repeat(f(self._warps(x), axis=1).astype(np.uint32), 32)

    def sync(self):
        assert self.mask.all() or not self.mask.any(), "barrier in a divergent branch"
        self.barriers += 1

    def cluster_sync(self):
        self.sync()
        if self.cluster is not None:
            self.cluster.wait()

    @contextmanager
    def when(self, condition):
        before, self.mask = self.mask, self.mask & condition
        yield
        self.mask = before

    def cond(self, condition, then, otherwise):
        condition = np.broadcast_to(condition, self.threads)
        if not (self.mask & condition).any():
            return otherwise
        with self.when(condition):
            values = then()
        return [np.where(condition, v, o) for v, o in zip(values, otherwise, strict=True)]

    def while_loop(self, condition, body, carry):
        before = self.mask
        while True:
            active = self.mask & condition(*carry)
            if not active.any():
                break
            self.mask = active
            carry = [np.where(active, n, o) for n, o in zip(body(*carry), carry, strict=True)]
        self.mask = before
        return carry


def run_cluster(blocks, threads, program):
    """Runs program(machine, rank) for every block of a cluster, in host threads that meet at cluster barriers."""
    barrier = threading.Barrier(blocks)
    errors = []

    def run(rank):
        try:
            program(Machine(threads, barrier), rank)
        except BaseException as e:
            errors.append(e)
            barrier.abort()

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(blocks)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if errors:
        raise errors[0]
