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

    def dots(self, a: list[Lane], b: Array, columns: int) -> list[Lane]:
        """E4M3 product [64, 128] x [128, columns] in fp32, complete when this returns.

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
        lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }")
        constraints = ",".join(["=&f"] * n + ["r"] * len(a) + ["l"] * steps)
        i64 = ir.IntegerType.get_signless(64)
        start = arith.shrui(
            arith.andi(llvm.ptrtoint(i64, b.pointer), arith.constant(i64, 0x3FFFF)), arith.constant(i64, 4)
        )
        descriptors = [
            arith.addi(start, arith.constant(i64, ir.IntegerAttr.get(i64, _SWIZZLED + 2 * step)))
            for step in range(steps)
        ]
        f32 = ir.F32Type.get()
        result = llvm.inline_asm(
            ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * n)})>"),
            [x.value for x in a] + descriptors,
            "\n".join(lines),
            constraints,
            has_side_effects=True,
            asm_dialect=0,
        )
        return [Lane(llvm.extractvalue(f32, result, [i])) for i in range(n)]

    def weighted(self, a: list[Lane], b: list[Lane], c: list[Lane]) -> list[Lane]:
        """c + a b of a warp, [16, 16] x [16, 8], float16 to float32 (`mma.m16n8k16`)."""
        f32 = ir.F32Type.get()
        result = llvm.inline_asm(
            ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
            [x.value for x in (*a, *b, *c)],
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
            "{$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            has_side_effects=True,
            asm_dialect=0,
        )
        return [Lane(llvm.extractvalue(f32, result, [i])) for i in range(4)]


def _asm(text: str, constraints: str, operands: list[Lane]) -> Lane:
    i32 = ir.IntegerType.get_signless(32)
    return Lane(
        llvm.inline_asm(i32, [x.value for x in operands], text, constraints, has_side_effects=False, asm_dialect=0)
    )
