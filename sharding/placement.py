"""Which physical expert slots hold which experts, and which replica a token takes.

The expert weights of a layer are stacks [physical slots, ...]; slot p lives on rank p // slots_per_rank. There may be
more slots than experts: an expert then has several replicas, all on distinct ranks. On the host a placement is an array
of `owners` int32 [layers, physical slots], the expert that each slot holds; `ExpertPlacement` is the same for the
device.
"""

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32


@flax.struct.dataclass
class ExpertPlacement:
    """Physical slots of every expert of every layer; shapes depend on the numbers of slots, experts and ranks alone."""

    slots: Int32[Array | np.ndarray, "layers experts replicas"]
    """Ascending; padded by repeating from the first on."""
    counts: Int32[Array | np.ndarray, "layers experts"]
    """How many of them are distinct, at least 1."""


def check_slots(experts: int, ranks: int, slots_per_rank: int) -> None:
    """Raises ValueError unless the slots can hold every expert, and replicas only on distinct ranks."""
    if ranks < 1 or not experts <= ranks * slots_per_rank <= experts * ranks:
        raise ValueError(
            f"{ranks} ranks of {slots_per_rank} expert slots: {experts} experts need at least {experts} slots in all"
            f" and at most {experts} per rank"
        )


def initial_owners(layers: int, experts: int, ranks: int, slots_per_rank: int) -> Int32[np.ndarray, "layers slots"]:
    """Slot p holds expert p modulo `experts`: without redundant slots, expert e is in slot e.

    Raises:
      ValueError: the slots do not fit the experts.
    """
    check_slots(experts, ranks, slots_per_rank)
    return np.tile(np.arange(ranks * slots_per_rank, dtype=np.int32) % experts, (layers, 1))


def check_owners(owners: Int[np.ndarray, "layers slots"], experts: int, ranks: int) -> None:
    """Raises ValueError unless every expert has a slot in every layer, none two on one rank, and no other id occurs."""
    layers, slots = owners.shape
    if slots % ranks:
        raise ValueError(f"owners: {slots} expert slots do not divide over {ranks} ranks")
    check_slots(experts, ranks, slots // ranks)
    if wrong := sorted(set(owners[(owners < 0) | (owners >= experts)].tolist())):
        raise ValueError(f"owners: experts {wrong} do not exist; allowed are 0..{experts - 1}")
    by_rank = np.sort(owners.reshape(layers, ranks, -1), -1)
    for layer, rank, slot in np.argwhere(by_rank[..., 1:] == by_rank[..., :-1]).tolist():
        raise ValueError(f"owners: layer {layer} has expert {by_rank[layer, rank, slot]} twice on rank {rank}")
    for layer in range(layers):
        if missing := sorted(set(range(experts)) - set(owners[layer].tolist())):
            raise ValueError(f"owners: layer {layer} has no slot for experts {missing}")


def replica_counts(owners: Int[np.ndarray, "layers slots"], experts: int) -> Int32[np.ndarray, "layers experts"]:
    """How many slots each expert has."""
    return np.stack([np.bincount(layer, minlength=experts) for layer in owners]).astype(np.int32)


def placement_from_owners(owners: Int[np.ndarray, "layers slots"], experts: int, ranks: int) -> ExpertPlacement:
    """The placement (numpy arrays) with these owners. The dimension `replicas` is the most an expert could ever have.

    Raises:
      ValueError: as `check_owners`.
    """
    check_owners(owners, experts, ranks)
    layers, physical = owners.shape
    replicas = min(ranks, physical - experts + 1)
    counts = replica_counts(owners, experts)
    by_expert = np.argsort(owners, axis=-1, kind="stable")
    first = np.cumsum(counts, -1) - counts
    index = first[..., None] + np.arange(replicas) % counts[..., None]
    slots = np.take_along_axis(by_expert, index.reshape(layers, -1), -1).reshape(layers, experts, replicas)
    return ExpertPlacement(slots.astype(np.int32), counts)


def owners_of(placement: ExpertPlacement, ranks: int, slots_per_rank: int) -> Int32[np.ndarray, "layers slots"]:
    """Inverse of `placement_from_owners`.

    Raises:
      ValueError: the placement has a slot that does not exist, one slot for two experts, or one for none; or as
        `check_owners`.
    """
    slots, counts = np.asarray(placement.slots), np.asarray(placement.counts)
    (layers, experts, replicas), physical = slots.shape, ranks * slots_per_rank
    if slots.min() < 0 or slots.max() >= physical:
        raise ValueError(f"placement.slots: {slots.min()}..{slots.max()}; allowed are 0..{physical - 1}")
    if counts.min() < 1 or counts.max() > replicas:
        raise ValueError(f"placement.counts: {counts.min()}..{counts.max()}; allowed are 1..{replicas}")
    layer, expert, replica = np.nonzero(np.arange(replicas) < counts[..., None])
    used = np.zeros((layers, physical), np.int32)
    np.add.at(used, (layer, slots[layer, expert, replica]), 1)
    for at, slot in np.argwhere(used != 1).tolist():
        raise ValueError(f"placement.slots: layer {at} uses slot {slot} {used[at, slot]} times; must be once")
    owners = np.zeros((layers, physical), np.int32)
    owners[layer, slots[layer, expert, replica]] = expert
    check_owners(owners, experts, ranks)
    return owners


def chosen_slots(
    slots: Int32[Array | np.ndarray, "experts replicas"],
    counts: Int32[Array | np.ndarray, " experts"],
    experts: Int[Array, "tokens k"],
    index: Int[Array, " tokens"],
) -> Int32[Array, "tokens k"]:
    """Physical slots that the tokens of one layer go to: a token takes replica `index` modulo count of each expert.

    Args:
      slots, counts: one layer of an `ExpertPlacement`.
      experts: ids in 0..E-1, of padded tokens too.
      index: of the token in its rank's batch, plus the rank, so that ranks of few tokens do not all take the first.
    """
    return jnp.asarray(slots)[experts, index[:, None] % jnp.asarray(counts)[experts]]
