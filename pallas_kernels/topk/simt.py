"""A small vocabulary for per-thread (SIMT) code inside a Mosaic GPU kernel.

Mosaic offers whole-array operations; selection needs votes, compaction and shared-memory counters. `Machine` emits
those as MLIR from within `plgpu.inline_mgpu`. Values are 32-bit unsigned integers, float32 or booleans, one per thread.
Kernel code written against this interface also runs on the emulator of the tests, which executes blocks in lockstep.
"""

from collections.abc import Callable
from contextlib import contextmanager

import jax.experimental.mosaic.gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

WARP = 32
_ALL_LANES = 0xFFFFFFFF


class Lane:
    """One scalar per thread with Python operators; integers are unsigned."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __add__(self, other):
        return self._arithmetic(arith.addi, arith.addf, other)

    def __sub__(self, other):
        return self._arithmetic(arith.subi, arith.subf, other)

    def __mul__(self, other):
        return self._arithmetic(arith.muli, arith.mulf, other)

    def __and__(self, other):
        return Lane(arith.andi(self.value, self._like(other)))

    def __or__(self, other):
        return Lane(arith.ori(self.value, self._like(other)))

    def __xor__(self, other):
        return Lane(arith.xori(self.value, self._like(other)))

    def __lshift__(self, other):
        return Lane(arith.shli(self.value, self._like(other)))

    def __rshift__(self, other):
        return Lane(arith.shrui(self.value, self._like(other)))

    def __invert__(self):
        return self ^ (True if self.value.type == _bool() else _ALL_LANES)

    def __lt__(self, other):
        return self._compare(arith.CmpIPredicate.ult, arith.CmpFPredicate.OLT, other)

    def __le__(self, other):
        return self._compare(arith.CmpIPredicate.ule, arith.CmpFPredicate.OLE, other)

    def __gt__(self, other):
        return self._compare(arith.CmpIPredicate.ugt, arith.CmpFPredicate.OGT, other)

    def __ge__(self, other):
        return self._compare(arith.CmpIPredicate.uge, arith.CmpFPredicate.OGE, other)

    def __eq__(self, other):
        return self._compare(arith.CmpIPredicate.eq, arith.CmpFPredicate.OEQ, other)

    def __ne__(self, other):
        return self._compare(arith.CmpIPredicate.ne, arith.CmpFPredicate.UNE, other)

    __hash__ = None

    def _like(self, other) -> ir.Value:
        return other.value if isinstance(other, Lane) else _constant(other, self.value.type)

    def _arithmetic(self, integer, floating, other):
        op = floating if self.value.type == _f32() else integer
        return Lane(op(self.value, self._like(other)))

    def _compare(self, integer, floating, other):
        if self.value.type == _f32():
            return Lane(arith.cmpf(floating, self.value, self._like(other)))
        return Lane(arith.cmpi(integer, self.value, self._like(other)))


class Machine:
    """Emits per-thread code at the current insertion point of a kernel of `threads` threads."""

    def __init__(self, threads: int):
        self.threads = threads
        self.tid = Lane(utils.thread_idx())
        self.lane = self.tid & (WARP - 1)
        self.warp = Lane(utils.warp_idx())

    def u32(self, value: int) -> Lane:
        return Lane(_constant(value, _i32()))

    def f32(self, value: float) -> Lane:
        return Lane(_constant(value, _f32()))

    def bits(self, x: Lane) -> Lane:
        return Lane(arith.bitcast(_i32(), x.value))

    def floats(self, x: Lane) -> Lane:
        return Lane(arith.bitcast(_f32(), x.value))

    def where(self, condition: Lane, x, y) -> Lane:
        like = x if isinstance(x, Lane) else y
        return Lane(arith.select(condition.value, like._like(x), like._like(y)))

    def popcount(self, x: Lane) -> Lane:
        return Lane(llvm.intr_ctpop(x.value))

    def bit_length(self, x: Lane) -> Lane:
        """Position of the highest set bit + 1; 0 for 0."""
        return self.u32(32) - Lane(llvm.intr_ctlz(x.value, is_zero_poison=False))

    # Memory. `index` counts elements from the start of the array.

    def load(self, ref, index: Lane | int) -> Lane:
        ty = ref.element
        return Lane(llvm.load(ty, _address(ref, index), alignment=4))

    def load4(self, ref, index: Lane) -> list[Lane]:
        """Four consecutive elements; `index` is a multiple of 4."""
        ty = ir.VectorType.get((4,), ref.element)
        v = llvm.load(ty, _address(ref, index), alignment=16)
        return [Lane(llvm.extractelement(v, arith.constant(_i32(), i))) for i in range(4)]

    def store(self, ref, index: Lane | int, value: Lane) -> None:
        llvm.store(value.value, _address(ref, index), alignment=4)

    def atomic_add(self, ref, index: Lane | int, value: Lane) -> Lane:
        """Adds to shared memory; the value before."""
        address = _address(ref, index)
        return Lane(llvm.atomicrmw(llvm.AtomicBinOp.add, address, value.value, llvm.AtomicOrdering.monotonic))

    def peer(self, ref, rank: Lane | int):
        """The same shared-memory array in another block of the cluster."""
        rank = rank.value if isinstance(rank, Lane) else _constant(rank, _i32())
        return Array(utils.get_cluster_ptr(ref.pointer, rank), ref.element)

    # Warp and block operations: every thread of the warp or block takes part.

    def ballot(self, predicate: Lane) -> Lane:
        mask = _constant(_ALL_LANES, _i32())
        return Lane(nvvm.vote_sync(mask, predicate.value, nvvm.VoteSyncKind.ballot))

    def any(self, predicate: Lane) -> Lane:
        mask = _constant(_ALL_LANES, _i32())
        return Lane(nvvm.vote_sync(mask, predicate.value, nvvm.VoteSyncKind.any))

    def broadcast(self, x: Lane, lane: int) -> Lane:
        return self._shuffle(x, lane, 0x1F, nvvm.ShflKind.idx)

    def shift_up(self, x: Lane, distance: int) -> Lane:
        """The value `distance` lanes below; the lowest lanes keep their own."""
        return self._shuffle(x, distance, 0, nvvm.ShflKind.up)

    def reduce(self, x: Lane, kind: str) -> Lane:
        """`kind` of add, umin, umax over the warp."""
        kinds = {"add": nvvm.ReductionKind.ADD, "umin": nvvm.ReductionKind.UMIN, "umax": nvvm.ReductionKind.UMAX}
        return Lane(utils.redux(x.value, _constant(_ALL_LANES, _i32()), kinds[kind]))

    def warp_atomic_add(self, ref, index: Lane | int, value: Lane) -> Lane:
        """One addition per warp of a value its lanes agree on; the value before, in all lanes."""
        branch = scf.IfOp((self.lane == 0).value, [_i32()], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([self.atomic_add(ref, index, value).value])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([_constant(0, _i32())])
        return self.broadcast(Lane(branch.results[0]), 0)

    def sync(self) -> None:
        nvvm.barrier()

    def cluster_sync(self) -> None:
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

    # Control flow. With `sync` or warp operations inside, the condition must agree in all threads taking part.

    @contextmanager
    def when(self, condition: Lane):
        with ir.InsertionPoint(scf.IfOp(condition.value).then_block):
            yield
            scf.yield_([])

    def cond(self, condition: Lane, then: Callable[[], list[Lane]], otherwise: list[Lane]) -> list[Lane]:
        branch = scf.IfOp(condition.value, [x.value.type for x in otherwise], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([x.value for x in then()])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([x.value for x in otherwise])
        return [Lane(x) for x in branch.results]

    def while_loop(self, condition: Callable, body: Callable, carry: list[Lane]) -> list[Lane]:
        types = [x.value.type for x in carry]
        loop = scf.WhileOp(types, [x.value for x in carry])
        before = loop.before.blocks.append(*types)
        with ir.InsertionPoint(before):
            lanes = [Lane(a) for a in before.arguments]
            scf.condition(condition(*lanes).value, [x.value for x in lanes])
        after = loop.after.blocks.append(*types)
        with ir.InsertionPoint(after):
            scf.yield_([x.value for x in body(*(Lane(a) for a in after.arguments))])
        return [Lane(x) for x in loop.results]

    def _shuffle(self, x: Lane, by: int, clamp: int, kind) -> Lane:
        mask, by, clamp = (_constant(v, _i32()) for v in (_ALL_LANES, by, clamp))
        return Lane(nvvm.shfl_sync(mask, x.value, by, clamp, kind))


class Array:
    """A pointer to elements of one type."""

    def __init__(self, pointer: ir.Value, element: ir.Type):
        self.pointer = pointer
        self.element = element


def array(ref: ir.Value) -> Array:
    """A memref argument of inline_mgpu (contiguous) as an Array."""
    return Array(utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type)


def scalar(argument: mgpu.FragmentedArray) -> Lane:
    """A scalar argument of inline_mgpu."""
    return Lane(argument.registers.item())


def result(x: Lane) -> mgpu.FragmentedArray:
    """A value all threads agree on, as a scalar result of inline_mgpu."""
    signed = True if isinstance(x.value.type, ir.IntegerType) else None
    return mgpu.FragmentedArray.splat(x.value, (), is_signed=signed)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _bool() -> ir.Type:
    return ir.IntegerType.get_signless(1)


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _constant(value: int | float, ty: ir.Type) -> ir.Value:
    if ty == _f32():
        return arith.constant(ty, ir.FloatAttr.get(ty, float(value)))
    value = int(value)
    bits = ir.IntegerType(ty).width
    return arith.constant(ty, ir.IntegerAttr.get(ty, value - (1 << bits) if value >= 1 << (bits - 1) else value))


def _address(ref: Array, index: Lane | int) -> ir.Value:
    return utils.getelementptr(ref.pointer, [index if isinstance(index, int) else index.value], ref.element)
