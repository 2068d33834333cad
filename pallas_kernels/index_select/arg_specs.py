"""Shapes of `index_select` in the released model, for tests and benchmarks: 32 heads of 128 channels, k = 512."""

import dataclasses

import jax
import jax.numpy as jnp

K = 512
BLOCK_SIZE = 8
PUBLISH = 2048


@dataclasses.dataclass(frozen=True)
class Shape:
    requests: int
    queries: int
    """Tokens per request."""
    entries: int
    per_page: int = 64
    mode: str = "plain"
    """ "plain"; "publish": returns candidate blocks; "restricted": selects from candidate blocks."""

    def arguments(self) -> tuple[tuple, dict]:
        """Positional and keyword arguments of `index_select`, arrays as shapes."""
        places = self.entries // self.per_page
        tokens = self.requests * self.queries
        array = jax.ShapeDtypeStruct
        arrays = (
            array((tokens, 32, 128), jnp.bfloat16),
            array((tokens, 32), jnp.bfloat16),
            array((self.requests * places, self.per_page, 68), jnp.uint8),
            array((self.requests, places), jnp.int32),
            array((self.requests,), jnp.int32),
            array((tokens,), jnp.int32),
        )
        restricted = {"candidates": array((tokens, PUBLISH), jnp.int32)} if self.mode == "restricted" else {}
        return arrays, restricted


SHAPES = {
    "16 x 1 x 1M": Shape(16, 1, 1_048_576),
    "16 x 6 x 1M": Shape(16, 6, 1_048_576),
    "64 x 1 x 128K": Shape(64, 1, 131_072),
    "64 x 6 x 128K": Shape(64, 6, 131_072),
    "16 x 6 x 512K, 32 per page": Shape(16, 6, 524_288, per_page=32),
    "16 x 6 x 1M, publish": Shape(16, 6, 1_048_576, mode="publish"),
    "16 x 6 x 1M, restricted": Shape(16, 6, 1_048_576, mode="restricted"),
    "1 x 2048 x 128K": Shape(1, 2048, 131_072),
}
