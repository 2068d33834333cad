"""A checkpoint directory to parameters, in memory or on devices.

Everything that headers and configuration can tell is checked before any tensor is read; a load is whole or not at all.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int32

from dsv4jax.checkpoint.placement import Index, place_leaves
from dsv4jax.checkpoint.safetensors import SafetensorsReader
from dsv4jax.checkpoint.values import convert_exactly, find_nan
from dsv4jax.config import ModelConfig
from dsv4jax.engram_hash import DEAD
from dsv4jax.params import (
    Params,
    abstract_params,
    checkpoint_inventory,
    named_leaves,
    tensor_names,
    with_expert_slots,
)
from dsv4jax.tokenizer import Tokenizer, check_engram_token_map, engram_token_map
from dsv4jax.weights import ArraySpec
from sharding import SINGLE, Layout
from sharding.placement import check_owners

ExpertOwners = Mapping[str, Int[np.ndarray, "layers slots"]]
"""The expert in each slot of every layer, by the stack of layers: "layers", or "mtp" for the stages of the draft."""


def load_params(
    path: str | Path,
    cfg: ModelConfig,
    layout: Layout = SINGLE,
    *,
    tables_on_device: bool = True,
    owners: ExpertOwners | None = None,
    progress: bool = True,
) -> Params:
    """The parameters of a checkpoint directory on the devices of `layout`.

    Each device's part is read from the mapped files alone. Host memory beyond the parameters is that of
    `placement.LEAVES_IN_FLIGHT` leaves. With `tables_on_device=False` the Engram tables are checked but not loaded:
    see `HostEngramTables`. With `owners` the experts of these stacks are read into the slots that they say, each
    replica by the device that holds it; without, expert e is in slot e.

    Raises:
      FileNotFoundError: no checkpoint there.
      ValueError: damaged files (see `SafetensorsReader`), tensors that do not fit `cfg`, a NaN code in a quantised
        tensor, an F32 tensor without exact BF16 form where BF16 is declared, a tokenizer that does not belong to the
        checkpoint, a dimension that does not divide over its mesh axis, owners that are none of these layers and
        experts (see `check_owners`), or too little memory.
    """
    for stack, of_stack in (owners or {}).items():
        _check_owners(cfg, stack, of_stack, layout.devices)
    leaves = CheckpointLeaves(path, cfg, tables_on_device, owners)
    return place_leaves(
        leaves.abstract, layout, leaves.read, done=leaves.release, progress=progress, description="loading"
    )


def stream_params(
    path: str | Path, cfg: ModelConfig, *, tables_on_device: bool = True
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, host array) of every leaf of `abstract_params`, one at a time.

    An expert stack is a new array; a leaf that is one tensor is a read-only view of the mapped file and takes no memory
    of its own. Memory stays at one leaf if the caller keeps none.

    Raises: as `load_params`; what the headers tell at once, what the values tell when the leaf's turn comes.
    """
    leaves = CheckpointLeaves(path, cfg, tables_on_device)

    def stream() -> Iterator[tuple[str, np.ndarray]]:
        for name in leaves.specs:
            yield name, leaves.read(name, (slice(None),) * len(leaves.specs[name].shape))
            leaves.release(name)

    return stream()


class CheckpointLeaves:
    """The leaves of `abstract_params` behind the tensors of a checkpoint that was found to fit its configuration.

    Attributes:
      abstract: the parameters with specs in place of arrays.
      specs: name to spec, in the order of `abstract`.
    """

    def __init__(
        self, path: str | Path, cfg: ModelConfig, tables_on_device: bool = True, owners: ExpertOwners | None = None
    ):
        """Opens and checks; raises as `load_params`."""
        self._reader = SafetensorsReader(path)
        self._reader.check(checkpoint_inventory(cfg))
        self._token_map = compressed_ids(Tokenizer.from_checkpoint(path), cfg)
        self._owners = owners or {}
        slots = {stack: of_stack.shape[1] for stack, of_stack in self._owners.items()}
        self.abstract = with_expert_slots(abstract_params(cfg, tables_on_device), slots)
        self.specs: dict[str, ArraySpec] = dict(named_leaves(self.abstract))

    def read(self, name: str, index: Index) -> np.ndarray:
        """The part `index` of a leaf; a view of the mapped file where nothing has to be assembled or converted.

        Raises:
          ValueError: a NaN code, or a value without exact form in the declared type.
        """
        spec = self.specs[name]
        if spec.derived:
            return self._token_map[index]
        if "*" not in name:
            return self._part(name, spec, index)
        shape = [len(range(*s.indices(n))) for s, n in zip(index, spec.shape, strict=True)]
        stack = np.empty(shape, spec.dtype)
        for slot, tensor in enumerate(self._tensors(name)[index[0]]):
            stack[slot] = self._part(tensor, spec, index[1:])
        return stack

    def release(self, name: str) -> None:
        """Takes the pages that were read for a leaf out of this process's memory."""
        for tensor in () if self.specs[name].derived else set(self._tensors(name)):
            self._reader.release(tensor)

    def _tensors(self, name: str) -> list[str]:
        """The tensors behind a leaf; of experts, slot by slot."""
        if "*" in name and (stack := name.split(".")[0]) in self._owners:
            owners = self._owners[stack][int(name.split(".")[1])]
            return [name.replace("*", str(expert)) for expert in owners.tolist()]
        return tensor_names(name, self.specs[name])

    def _part(self, tensor: str, spec: ArraySpec, index: Index) -> np.ndarray:
        first = tuple(s.start or 0 for s in index)
        values = self._reader.view(tensor)[index]
        if (found := find_nan(spec.stored, values)) is not None:
            place = [i + j for i, j in zip(found, first, strict=True)]
            raise ValueError(f"tensor {tensor!r}: {spec.stored} code of NaN at {place}")
        return convert_exactly(tensor, values, spec.dtype, first)


def _check_owners(cfg: ModelConfig, stack: str, owners: Int[np.ndarray, "layers slots"], devices: int) -> None:
    sizes = {
        "layers": (cfg.num_hidden_layers, cfg.n_routed_experts),
        "mtp": (cfg.num_nextn_predict_layers, cfg.dspark_n_routed_experts),
    }
    if stack not in sizes:
        raise ValueError(f"owners: {stack!r} has no experts, only {' and '.join(map(repr, sizes))} have")
    layers, experts = sizes[stack]
    if len(owners) != layers:
        raise ValueError(f"owners: those of {stack!r} are for {len(owners)} layers, the model has {layers}")
    check_owners(owners, experts, devices)


def compressed_ids(tokenizer: Tokenizer, cfg: ModelConfig) -> Int32[np.ndarray, " vocab"]:
    """`engram_token_map` for every id of the model: ids that the tokenizer does not have are DEAD.

    Raises:
      ValueError: the tokenizer does not belong to the configuration.
    """
    token_map = engram_token_map(tokenizer)
    check_engram_token_map(token_map, cfg.engram_compressed_vocab_size)
    if len(token_map) > cfg.vocab_size:
        raise ValueError(f"the tokenizer has {len(token_map)} ids but vocab_size is {cfg.vocab_size}")
    return np.concatenate([token_map, np.full(cfg.vocab_size - len(token_map), DEAD, np.int32)])
