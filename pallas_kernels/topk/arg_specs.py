"""Shapes of `topk` in the released model, for tests and benchmarks: (rows, entries) of fp32 scores, k = 512."""

K = 512

SHAPES = {
    "64 x 32K": (64, 32_768),
    "16 x 512K": (16, 524_288),
    "64 x 1M": (64, 1_048_576),
    "512 x 512K": (512, 524_288),
    "1 x 1M": (1, 1_048_576),
}
