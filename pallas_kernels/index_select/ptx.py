"""The PTX that the score kernel needs and Pallas has no primitive for."""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.topk.simt import Array, Lane
from pallas_kernels.topk.simt import Machine as SimtMachine

_SWIZZLED = 1 << 62 | 64 << 32 | 1 << 16
"""Matrix descriptor of rows of 128 bytes in the 128-byte swizzle: groups of 8 rows are 1024 bytes apart."""


class Machine(SimtMachine):
    """Per-thread code with byte permutes and tensor cores."""

    def maximum(self, x: Lane, y: Lane) -> Lane:
        """The larger of two float32; of a number and NaN the number."""
        return Lane(arith.maxnumf(x.value, y.value))

    def exchange(self, x: Lane, distance: int) -> Lane:
        """The value of the lane whose number differs in the bit `distance`."""
        return Lane(utils.shfl_bfly(x.value, distance))

    def permute(self, low: Lane, high: Lane, selector: Lane) -> Lane:
        """Each of the four low nibbles of `selector`, below 8, picks one of eight bytes."""
        return _asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector])

    def pack_relu(self, low: Lane, high: Lane) -> Lane:
        """max(x, 0) of two float32 as a pair of float16."""
        return _asm("cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high])

    def load_near(self, ref: Array, index: Lane, offsets: list[int]) -> list[Lane]:
        """Elements at fixed offsets from an index, with one address for all."""
        pointer = utils.getelementptr(ref.pointer, [index.value], ref.element)
        return [self.load(Array(pointer, ref.element), offset) for offset in offsets]

    def larger_halves(self, x: Lane, y: Lane) -> Lane:
        """The larger of the low, and of the high 16 bits."""
        return _asm("max.u16x2 $0, $1, $2;", "=r,r,r", [x, y])

    def start_dots(self, a: list[Lane], b: Array, columns: int) -> list[Lane]:
        """E4M3 product [64, 128] x [128, columns] in fp32; `finish_dots` gives the results, `a` is in use until then.

        Args:
          a: this thread's part of the left matrix: the 4 registers of `wgmma` for each 32 channels.
          b: the right matrix, transposed, in shared memory: rows of 128 bytes, swizzled (`pack.swizzle`), aligned to
            1024 bytes.
        """
        n = columns // 2
        outputs = ", ".join(f"${i}" for i in range(n))
        steps = len(a) // 4
        lines = ["{ .reg .pred no, yes; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;", "wgmma.fence.sync.aligned;"]
        for step in range(steps):
            inputs = ", ".join(f"${n + 4 * step + i}" for i in range(4))
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {{{outputs}}}, {{{inputs}}}, "
                f"${n + len(a) + step}, {'yes' if step else 'no'}, 1, 1;"
            )
        lines.append("wgmma.commit_group.sync.aligned; }")
        constraints = ",".join(["=&f"] * n + ["r"] * len(a) + ["l"] * steps)
        i64 = ir.IntegerType.get_signless(64)
        start = arith.shrui(
            arith.andi(llvm.ptrtoint(i64, b.pointer), arith.constant(i64, 0x3FFFF)), arith.constant(i64, 4)
        )
        descriptors = [
            arith.addi(start, arith.constant(i64, ir.IntegerAttr.get(i64, _SWIZZLED + 2 * step)))
            for step in range(steps)
        ]
        operands = [x.value for x in a] + descriptors
        return _many("\n".join(lines), constraints, operands, n)

    def finish_dots(self, pending: int, results: list[Lane]) -> list[Lane]:
        """Waits until at most `pending` later products run; the results of this one."""
        n = len(results)
        constraints = ",".join(["=f"] * n + [str(i) for i in range(n)] + ["~{memory}"])
        text = f"wgmma.wait_group.sync.aligned {pending};"
        return _many(text, constraints, [x.value for x in results], n)

    def weighted(self, a: list[Lane], b: list[Lane], c: list[Lane]) -> list[Lane]:
        """c + a b of a warp, [16, 16] x [16, 8], float16 to float32 (`mma.m16n8k16`)."""
        return _many(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
            "{$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [x.value for x in (*a, *b, *c)],
            4,
        )

    def address(self, array: Array) -> Lane:
        """Address of an array in shared memory."""
        return Lane(llvm.ptrtoint(ir.IntegerType.get_signless(32), array.pointer))

    def init_barriers(self, barriers: Lane, number: int) -> None:
        """Makes barriers of one arrival, 8 bytes each; all threads of the block take part."""
        with self.when(self.tid == 0):
            for i in range(number):
                _effect("mbarrier.init.shared::cta.b64 [$0], 1;", "r", [barriers + 8 * i])
            _effect("fence.mbarrier_init.release.cluster;", "", [])
        self.sync()

    def expect(self, barrier: Lane, size: int) -> None:
        """Arrives, and announces so many bytes of copies."""
        _effect(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};", "r", [barrier])

    def wait(self, barrier: Lane, parity: Lane) -> None:
        """Returns once the phase of that parity has completed."""
        text = (
            "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE; bra WAIT; DONE: }"
        )
        _effect(text, "r,r", [barrier, parity])

    def copy(self, target: Lane, source: Array, offset: Lane, unit: int, size: int, barrier: Lane) -> None:
        """Copies `size` bytes from `offset` x `unit` bytes behind `source` to shared memory; completes on `barrier`."""
        i64, i8 = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
        offset = arith.muli(arith.extui(i64, offset.value), arith.constant(i64, unit))
        address = llvm.ptrtoint(i64, utils.getelementptr(source.pointer, [offset], i8))
        text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];"
        _effect(text, "r,l,r", [target, Lane(address), barrier])

    def sync_warpgroup(self, number: Lane) -> None:
        """Barrier of the 128 threads that call with the same `number`, 1 to 15."""
        _effect("bar.sync $0, 128;", "r", [number])

    def hold(self) -> None:
        """A barrier of the warp, so that the branch it is in stays one: predicated code would cost all warps."""
        _effect("bar.warp.sync 0xffffffff;", "", [])

    def quotient(self, x: Lane, by: int) -> tuple[Lane, Lane]:
        """Quotient and remainder."""
        by = arith.constant(ir.IntegerType.get_signless(32), by)
        return Lane(arith.divui(x.value, by)), Lane(arith.remui(x.value, by))


def _asm(text: str, constraints: str, operands: list[Lane]) -> Lane:
    i32 = ir.IntegerType.get_signless(32)
    return Lane(
        llvm.inline_asm(i32, [x.value for x in operands], text, constraints, has_side_effects=False, asm_dialect=0)
    )


def _effect(text: str, constraints: str, operands: list[Lane]) -> None:
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [x.value for x in operands],
        text,
        f"{constraints},~{{memory}}" if constraints else "~{memory}",
        has_side_effects=True,
        asm_dialect=0,
    )


def _many(text: str, constraints: str, operands: list[ir.Value], number: int) -> list[Lane]:
    """PTX with `number` float32 results."""
    f32 = ir.F32Type.get()
    kind = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * number)})>")
    result = llvm.inline_asm(kind, operands, text, constraints, has_side_effects=True, asm_dialect=0)
    return [Lane(llvm.extractvalue(f32, result, [i])) for i in range(number)]
