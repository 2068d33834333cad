"""Shapes of the routed experts of the released model on one of eight ranks, for tests and benchmarks."""

HIDDEN, WIDTH, EXPERTS, K, LIMIT = 5120, 2304, 48, 6, 10.0

TOKENS = {"48 rows": 8, "384 rows": 64, "576 rows": 96, "3072 rows": 512, "24576 rows": 4096}
"""Tokens by the number of routed rows."""
