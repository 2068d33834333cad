"""The sizes of the released model that tests lower and benchmarks time."""

Q_LORA, DIM, INDEX_DIM, PAIRS = 1280, 512, 128, 32
EPS = 1e-6
RING = 136
"""Places of a window ring: 128 and 8 more."""
PAGE_ENTRIES = 32
"""Entries of a page of 64 tokens at ratio 2."""
TOKENS = (8, 16, 96)
"""Tokens of a decode step."""
