"""The products of the released model that tests lower and benchmarks time."""

import dataclasses

GROUPS = 8
"""Groups of `wo_a`."""


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """A product with a weight [out, inner]; that of `wo_a` is grouped and its input bfloat16."""

    out: int
    inner: int
    grouped: bool = False


ARG_SPECS = {
    "wq_a": ArgSpec(1280, 5120),
    "wkv": ArgSpec(512, 5120),
    "wq_a + wkv": ArgSpec(1792, 5120),
    "wq_b": ArgSpec(32768, 1280),
    "wq_b of the indexer": ArgSpec(4096, 1280),
    "wo_b": ArgSpec(5120, 8192),
    "w1": ArgSpec(2304, 5120),
    "w1 + w3": ArgSpec(4608, 5120),
    "w2": ArgSpec(5120, 2304),
    "wo_a": ArgSpec(8192, 4096, grouped=True),
}
"""A sum stands for weights with the same input that are stacked to one."""
ROWS = (8, 16, 96)
"""Rows of a decode step: requests times tokens of each."""
