"""Sizes of the released model, and tokens of decode steps and of a prefill chunk, for tests and benchmarks."""

EXPERTS, K, SCALE = 384, 6, 1.5

TOKENS = (1, 16, 96, 8192)
