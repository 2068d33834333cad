"""The sizes of the released model that tests lower and benchmarks time."""

STREAMS, HIDDEN = 4, 5120
TOKENS = (8, 16, 96)
"""Tokens of a decode step."""
