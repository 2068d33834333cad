"""What is kept of the experts' loads, on the device: recording a step costs the host one dispatch and no transfer."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32

from dsv4jax.quant import ceil_div


@flax.struct.dataclass
class LoadRecord:
    """Loads of the newest steps of one kind (prefill or decode) of one stack of layers (target or draft).

    A ring of `window` steps; of every ⌈window / rows⌉th step all loads are kept. Totals are of all steps. A load is a
    number of tokens, without padding and dummy rows, as `StepOutput.expert_load` has it. Takes
    4 (rows + 1) layers · experts + 8 window · layers + 4 layers · slots bytes on each device: 16 MB for 40 layers of
    384 experts with 250 rows and 1000 steps.
    """

    steps: Int32[Array, ""]
    """Recorded so far; steps without any token are not."""
    totals: Int32[Array, "layers experts"]
    vectors: Int32[Array, "rows layers experts"]
    routed: Int32[Array, "window layers"]
    """Sum of the loads of a step: tokens times experts per token."""
    busiest: Float32[Array, "window layers"]
    """Load of the busiest rank in a step, an expert's tokens split evenly over its replicas."""
    owners: Int32[Array, "layers slots"]
    """The expert in each slot, of the placement that steps run with."""

    @property
    def stride(self) -> int:
        """Steps from one row of `vectors` to the next."""
        return ceil_div(self.routed.shape[0], max(1, self.vectors.shape[0]))


def empty_record(owners: Int32[np.ndarray, "layers slots"], experts: int, window: int, rows: int) -> LoadRecord:
    """A record of no steps (numpy arrays)."""
    layers = len(owners)
    return LoadRecord(
        steps=np.zeros((), np.int32),
        totals=np.zeros((layers, experts), np.int32),
        vectors=np.zeros((rows, layers, experts), np.int32),
        routed=np.zeros((window, layers), np.int32),
        busiest=np.zeros((window, layers), np.float32),
        owners=owners,
    )


@functools.partial(jax.jit, donate_argnames="record")
def clear_record(record: LoadRecord) -> LoadRecord:
    """A record of no steps in the memory of `record`, which is donated; `steps` says that its rings hold none."""
    return record.replace(steps=record.steps * 0, totals=record.totals * 0)


@jax.jit
def set_owners(record: LoadRecord, layer: Int32[Array, ""], owners: Int32[Array, " slots"]) -> LoadRecord:
    """The record for steps that run with another placement of one layer."""
    return record.replace(owners=record.owners.at[layer].set(owners))


@functools.partial(jax.jit, donate_argnames="record", static_argnames="ranks")
def record_load(record: LoadRecord, load: Int[Array, "layers experts"], *, ranks: int) -> LoadRecord:
    """Adds a step. The record is donated.

    Args:
      load: tokens routed to each expert in all ranks.
    """
    window, rows, stride = record.routed.shape[0], record.vectors.shape[0], record.stride
    any_token = jnp.any(load > 0)
    vectors = record.vectors
    if rows:
        row = jnp.where(any_token & (record.steps % stride == 0), record.steps // stride % rows, rows)
        vectors = vectors.at[row].set(load, mode="drop")
    at = jnp.where(any_token, record.steps % window, window)
    return record.replace(
        steps=record.steps + any_token,
        totals=record.totals + load,
        vectors=vectors,
        routed=record.routed.at[at].set(jnp.sum(load, -1), mode="drop"),
        busiest=record.busiest.at[at].set(_busiest(load, record.owners, ranks), mode="drop"),
    )


def _busiest(
    load: Int[Array, "layers experts"], owners: Int32[Array, "layers slots"], ranks: int
) -> Float32[Array, " layers"]:
    layers = jnp.arange(len(load))[:, None]
    counts = jnp.zeros_like(load).at[layers, owners].add(1)
    share = jnp.take_along_axis(load / counts, owners, -1)
    return jnp.max(jnp.sum(share.reshape(len(load), ranks, -1), -1), -1)


def recorded_loads(record: LoadRecord) -> Int32[np.ndarray, "steps layers experts"]:
    """Loads per kept step, or the totals as one step if the record has no rows for steps; copies to the host."""
    steps = int(record.steps)
    if not record.vectors.shape[0]:
        return np.asarray(record.totals)[None][: min(1, steps)]
    return np.asarray(record.vectors)[: ceil_div(steps, record.stride)]
