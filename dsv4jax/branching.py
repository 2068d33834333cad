"""Work that only some batches need."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array, Bool


def where_needed(needed: Bool[Array, ""], compute: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """compute(), or otherwise() where it is not `needed` and gives the same for less: arrays of the same shapes.

    On a GPU it is always compute(). There the host decides a conditional: it waits until the device has come that far,
    and could not send the next step meanwhile.
    """
    return lax.platform_dependent(default=lambda: lax.cond(needed, compute, otherwise), cuda=compute)
