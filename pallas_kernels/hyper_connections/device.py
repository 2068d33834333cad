"""Per-thread operations of the hyper-connection kernel beyond those on rows: copies, products and blocks that wait."""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels import rows
from pallas_kernels.topk.simt import Array, Lane


class Machine(rows.Machine):
    """Per-thread code with what a site needs besides."""

    def store4(self, ref: Array, index: Lane, values: list[Lane]) -> None:
        """Stores four consecutive elements; `index` is a multiple of 4."""
        kind = ir.VectorType.get((4,), ref.element)
        vector = llvm.mlir_undef(kind)
        for i, value in enumerate(values):
            vector = llvm.insertelement(vector, value.value, self.u32(i).value)
        llvm.store(vector, self.row(ref, index, 1).pointer, alignment=16)

    def copy_fours(self, to: Array, index: Lane, source: Array, at: Lane, offsets: list[tuple[int, int]]) -> None:
        """Begins to copy four words from device to shared memory for each pair of offsets: from `index`, from `at`."""
        to = llvm.ptrtoint(ir.IntegerType.get_signless(32), self.row(to, index, 1).pointer)
        source = llvm.ptrtoint(ir.IntegerType.get_signless(64), self.row(source, at, 1).pointer)
        text = "".join(f"cp.async.cg.shared.global [$0+{4 * a}], [$1+{4 * b}], 16;" for a, b in offsets)
        _effect(text, "r,l", [to, source])

    def wait_for_copies(self, after: Lane) -> None:
        """Waits for the copies that the thread began, not before the fp32 value `after`, never negative, is known.

        Without a branch that depends on it the assembler puts the wait before other loads.
        """
        text = "{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p bra past; cp.async.wait_all; past: }"
        _effect(text, "f", [after.value])

    def multiply(self, a: list[Lane], b: list[Lane], c: list[Lane]) -> list[Lane]:
        """c + a b of a warp, [16, 16] x [16, 8], bfloat16 to fp32 (`mma.m16n8k16`)."""
        kind = llvm.StructType.get_literal([ir.F32Type.get()] * 4)
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9},"
            " {$10, $11, $12, $13};"
        )
        operands = [x.value for x in (*a, *b, *c)]
        constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
        both = llvm.inline_asm(kind, operands, text, constraints, has_side_effects=False, asm_dialect=0)
        return [Lane(llvm.extractvalue(ir.F32Type.get(), both, [i])) for i in range(4)]

    def fma(self, x: Lane, y: Lane, z: Lane) -> Lane:
        """x y + z of fp32, rounded once."""
        return Lane(llvm.intr_fma(x.value, y.value, z.value))

    def exp(self, x: Lane) -> Lane:
        """e^x to about 2 units in the last place: 2^t with t = x log2(e), corrected by what the rounding of t lost."""
        text = (
            "{ .reg .f32 t, r; mul.rn.f32 t, $1, 0f3fb8aa3b; neg.f32 r, t; fma.rn.f32 r, $1, 0f3fb8aa3b, r;"
            " fma.rn.f32 r, $1, 0f32a57060, r; mul.rn.f32 r, r, 0f3f317218; ex2.approx.ftz.f32 t, t;"
            " fma.rn.f32 $0, t, r, t; }"
        )
        kind = ir.F32Type.get()
        return Lane(llvm.inline_asm(kind, [x.value], text, "=f,f", has_side_effects=False, asm_dialect=0))

    def arrive(self, counters: Array, index: Lane) -> None:
        """Counts the block as arrived at a counter; its writes so far are seen by blocks that wait for it."""
        self.sync()
        with self.when(self.tid == 0):
            _effect("red.release.gpu.global.add.u32 [$0], 1;", "l", [_place(self, counters, index)])

    def wait(self, counters: Array, index: Lane, blocks: int) -> None:
        """Waits until `blocks` blocks have arrived."""
        with self.when(self.tid == 0):
            text = (
                "{ .reg .pred p; .reg .b32 n; again: ld.acquire.gpu.global.b32 n, [$0];"
                f" setp.lt.u32 p, n, {blocks}; @p bra again; }}"
            )
            _effect(text, "l", [_place(self, counters, index)])
        self.sync()

    def leave(self, counters: Array, index: Lane, blocks: int) -> None:
        """By one thread of a block that has waited: the last of `blocks` blocks to leave sets the counter to zero."""
        text = (
            "{ .reg .pred p; .reg .b32 n; atom.relaxed.gpu.global.add.u32 n, [$0], 1;"
            f" setp.eq.u32 p, n, {2 * blocks - 1}; @p st.relaxed.gpu.global.b32 [$0], 0; }}"
        )
        _effect(text, "l", [_place(self, counters, index)])


def _place(m: Machine, ref: Array, index: Lane) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), m.row(ref, index, 1).pointer)


def _effect(text: str, constraints: str, operands: list[ir.Value]) -> None:
    constraints = ",".join(filter(None, [constraints, "~{memory}"]))
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, text, constraints, has_side_effects=True, asm_dialect=0)
