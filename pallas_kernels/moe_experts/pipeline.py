"""What both expert matmuls need for their rings of copies: barriers, places in a ring, registers of the readers."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels.moe_experts import ptx


def consumer_registers(consumers: int, producer_registers: int) -> int:
    """Registers per thread of the computing warpgroups, out of what the copying one gives back."""
    launched = 65536 // 128 // (consumers + 1) // 8 * 8
    return min((launched * (consumers + 1) - producer_registers) // consumers // 8 * 8, 240)


def next_slot(slot, phase, count):
    """The slot behind `slot` of a ring of `count`, and the parity of its barriers."""
    wraps = slot + 1 == count
    return jnp.where(wraps, 0, slot + 1), jnp.where(wraps, phase ^ 1, phase)


def init_barriers(barriers, arrivals: Sequence[int]) -> None:
    """Makes a barrier in each 8 bytes of `barriers`, that completes a phase after so many arrivals; all threads take
    part."""

    @plgpu.inline_mgpu(arg_types=(ptx.REF,))
    def init(_, barriers):
        base = ptx.shared(barriers)
        with mgpu.utils.when(ptx.equal(mgpu.utils.thread_idx(), 0)):
            for i, count in enumerate(arrivals):
                ptx.barrier_init(ptx.add(base, 8 * i), count)
            ptx.asm("fence.mbarrier_init.release.cluster;", "")
        ptx.asm("barrier.sync 0;", "")

    init(barriers)


def wait(barrier, phase) -> None:
    """Returns once the phase of that parity has completed."""

    @plgpu.inline_mgpu(arg_types=(ptx.REF, ptx.SCALAR))
    def run(_, barrier, phase):
        ptx.barrier_wait(ptx.shared(barrier), ptx.scalar(phase))

    run(barrier, phase)


def release(barrier) -> None:
    """One arrival of each warp, see `ptx.warp_arrive`."""

    @plgpu.inline_mgpu(arg_types=(ptx.REF,))
    def run(_, barrier):
        ptx.warp_arrive(ptx.shared(barrier))

    run(barrier)


def release_after(barrier, acc) -> None:
    """`release` once the sums `acc` of 64 channels are there, and with them all loads that went in.

    The address of the arrival depends on the sums, through a mask that is zero, as shared memory ends below 2^20.
    """

    @plgpu.inline_mgpu(arg_types=(ptx.REF, plgpu.Layout._WGMMA_ACC_32BIT))
    def run(_, barrier, acc):
        address = ptx.shared(barrier)
        # One sum of every 8 rows: the scales of their activations are the last loads.
        bits = functools.reduce(arith.ori, map(ptx.as_bits, ptx.warpgroup_values(acc)[::4]))
        ptx.warp_arrive(ptx.add(address, arith.andi(bits, ptx.right(address, 20))))

    run(barrier, acc)
