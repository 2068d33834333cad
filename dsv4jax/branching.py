"""Work that only some batches need."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool


def where_needed(needed: Bool[Array, ""], compute: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """compute() if `needed`, else otherwise(): arrays of the same shapes.

    On a GPU both are computed. There the host decides a conditional: it waits until the device has come that far, and
    could not send the next step meanwhile.
    """

    def by_branch():
        return lax.cond(needed, compute, otherwise)

    def by_choice():
        return jax.tree.map(lambda a, b: jnp.where(needed, a, b), compute(), otherwise())

    return lax.platform_dependent(default=by_branch, cuda=by_choice)
