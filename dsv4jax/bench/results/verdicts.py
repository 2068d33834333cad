"""Sentences that sum up numbers, each with the number that makes it true."""

from collections.abc import Mapping

LIMITING = 0.5
"""Share of a whole from which on one part alone is said to limit it."""


def limit(parts: Mapping[str, float], whole: str) -> str:
    """What a whole is limited by: the part that takes at least half of it, if there is one.

    Args:
      parts: what the whole consists of, in one unit.
      whole: its name.

    Raises:
      ValueError: no part, or their sum is not positive.
    """
    total = sum(parts.values())
    if not total > 0:
        raise ValueError(f"parts = {dict(parts)}: must have a positive sum")
    largest = max(parts, key=parts.__getitem__)
    share = parts[largest] / total
    if share >= LIMITING:
        return f"limited by {largest}: {share:.0%} of {whole}"
    return f"no part alone limits {whole}: the largest is {largest}, {share:.0%}"
