"""How many held-out examples of each skill a model answers exactly."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from dsv4jax.config import ModelConfig
from dsv4jax.linear import linear_fp32
from dsv4jax.model.transformer import merge
from dsv4jax.numerics import Numerics
from dsv4jax.tokenizer import Tokenizer
from dsv4jax.training.forward import training_forward
from dsv4jax.training.parameters import Masters, rounded_params
from dsv4jax.training.skills import Example, held_out_examples


@functools.partial(jax.jit, static_argnames=("cfg", "numerics", "select"))
def replies_right(
    masters: Masters,
    tokens: Int32[Array, "rows length"],
    begins: Int32[Array, " rows"],
    ends: Int32[Array, " rows"],
    token_map: Int32[Array, " vocab"],
    *,
    cfg: ModelConfig,
    numerics: Numerics,
    select: bool,
) -> Bool[Array, " rows"]:
    """Whether every token in begins..ends is the most probable one after those before it: then and only then greedy
    decoding gives exactly these."""
    model = merge(cfg, rounded_params(masters, cfg, token_map))
    out = training_forward(model, tokens, numerics=numerics, select=select, offset=jnp.int32(0))
    best = jnp.argmax(linear_fp32(out.hidden, model.head), -1)
    at = jnp.arange(1, tokens.shape[1])
    asked = (at >= begins[:, None]) & (at < ends[:, None])
    return jnp.all((best[:, :-1] == tokens[:, 1:]) | ~asked, -1)


def examine(
    right: Callable[[np.ndarray, np.ndarray, np.ndarray], Array],
    tokenizer: Tokenizer,
    skills: Sequence[str],
    batch: int,
    length: int,
    seed: int,
) -> dict[str, float]:
    """Share of `batch` held-out examples per skill, at most `length` tokens long, whose last reply is right.

    Args:
      right: `replies_right` of tokens [batch, length], begins and ends.
    """
    return {
        name: float(np.mean(right(*reply_rows(held_out_examples(name, seed, batch, length), tokenizer, length))))
        for name in skills
    }


def reply_rows(
    examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> tuple[Int32[np.ndarray, "rows length"], Int32[np.ndarray, " rows"], Int32[np.ndarray, " rows"]]:
    """One conversation a row, and where its last reply begins and ends.

    Raises:
      ValueError: a conversation is longer than a row.
    """
    tokens = np.full((len(examples), length), tokenizer.pad_id, np.int32)
    begins, ends = np.zeros((2, len(examples)), np.int32)
    for row, example in enumerate(examples):
        ids, _ = example.encoded(tokenizer)
        if len(ids) > length:
            raise ValueError(f"example {row}: {len(ids)} tokens do not fit a row of {length}")
        tokens[row, : len(ids)] = ids
        begins[row], ends[row] = len(example.prompt(tokenizer)), len(ids)
    return tokens, begins, ends
