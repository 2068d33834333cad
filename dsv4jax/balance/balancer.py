"""Balancing while serving: records loads, and brings a better placement into force layer by layer.

    params, placement = balancer.advance(params, placement)    # between any two steps
    cache, output = decode_step(params, cache, batch, cfg=cfg, layout=layout, placement=placement)
    balancer.record(output.expert_load, "decode")

A layer is rearranged into a spare stack of its own, a few experts per step; steps go on with the layer as it is. When
all are in place, weights and map of the layer change together between two steps. Before that nothing of the arguments
has been touched, so a failure costs the spare stack and nothing else.

What is decided, and in which step, depends on recorded loads and counts of calls alone, which all processes of a mesh
share; as with a step, a failure in one of them must end them all. Each advance does at most one of: choose the
placement of one layer, move a few experts, change a layer over.
"""

import collections
import dataclasses
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Int, Int32

from dsv4jax.balance.metrics import BalanceMetrics, balancedness
from dsv4jax.balance.record import LoadRecord, clear_record, empty_record, record_load, recorded_loads, set_owners
from dsv4jax.balance.solver import Solver
from dsv4jax.params import Params
from sharding.move import copy_arrays, copy_slots, put_like, spread_experts
from sharding.placement import ExpertPlacement, check_owners, placement_from_owners

StepKind = Literal["prefill", "decode"]
Stack = Literal["layers", "mtp"]
"""Of layers with experts: the target's or the draft's."""


@dataclasses.dataclass(frozen=True)
class BalanceConfig:
    """When to balance.

    Args:
      interval: steps from the begin of one rearrangement to the next. One that is still under way then goes on, and the
        next begins an interval later.
      window: a rearrangement is made for the loads of that many steps before it.
      vectors: of how many steps in the window, evenly spaced, the loads are kept one by one; 0 = only their sum.
      experts_per_step: experts that are moved between two steps; each takes its bytes on every device meanwhile.

    Raises:
      ValueError: a value is out of range.
    """

    window: int = 1000
    interval: int = 3000
    vectors: int = 250
    experts_per_step: int = 8

    def __post_init__(self):
        if not 1 <= self.window <= self.interval:
            raise ValueError(f"window = {self.window}: must be 1 to interval = {self.interval}")
        if not 0 <= self.vectors <= self.window:
            raise ValueError(f"vectors = {self.vectors}: must be 0 to window = {self.window}")
        if self.experts_per_step < 1:
            raise ValueError(f"experts_per_step = {self.experts_per_step}: must be positive")


@dataclasses.dataclass
class _Rearrangement:
    """A layer on its way: `spare` has the experts of `owners` in all slots but those of `moves` still to come."""

    layer: int
    owners: Int32[np.ndarray, " slots"]
    moves: collections.deque[tuple[int, int]]  # (slot to copy from, slot to copy to)
    spare: Any


class ExpertBalancer:
    """Balances one stack of layers.

    Args:
      owners: the expert in each slot at the start, for every layer, as `sharding.placement.initial_owners` gives it.
      experts, experts_per_token: of the model, for this stack.

    Raises:
      ValueError: the owners are not valid for these experts and the solver's ranks.
    """

    def __init__(
        self,
        cfg: BalanceConfig,
        solver: Solver,
        owners: Int[np.ndarray, "layers slots"],
        *,
        stack: Stack,
        experts: int,
        experts_per_token: int,
    ):
        check_owners(owners, experts, solver.ranks)
        self.cfg, self.solver, self.stack = cfg, solver, stack
        self.experts, self.experts_per_token = experts, experts_per_token
        self.owners = owners.astype(np.int32)
        self._records: dict[str, LoadRecord] = {}
        self._snapshot: list[LoadRecord] = []
        self._loads = np.zeros((0, len(owners), experts), np.int32)
        self._layers: collections.deque[int] = collections.deque()
        self._current: _Rearrangement | None = None
        self._advances = self._rearrangements = self._moved = self._failures = 0
        self._begun_at = -1

    @property
    def placement(self) -> ExpertPlacement:
        """The placement in force (numpy arrays)."""
        return placement_from_owners(self.owners, self.experts, self.solver.ranks)

    def record(self, expert_load: Int[Array, "layers experts"], kind: StepKind) -> None:
        """Adds a step's loads, `StepOutput.expert_load`, without waiting for them; before the next `advance`.

        Steps without tokens do not count.

        Raises:
          ValueError: the loads are of another stack.
        """
        expected = len(self.owners), self.experts
        if expert_load.shape != expected:
            raise ValueError(f"expert_load {expert_load.shape}: {self.stack!r} has (layers, experts) = {expected}")
        if kind not in self._records:
            record = empty_record(self.owners, self.experts, self.cfg.window, self.cfg.vectors)
            self._records[kind] = put_like(record, expert_load)
        self._records[kind] = record_load(self._records[kind], expert_load, ranks=self.solver.ranks)

    def advance(self, params: Params, placement: ExpertPlacement) -> tuple[Params, ExpertPlacement]:
        """Goes on with balancing; call once between any two steps, with what the next step would run with.

        Returns what it is to run with: mostly just these, and one layer of both changed when it is ready. The arguments
        are not changed, and are those that steps in flight go on with. Arrays stay on the devices where they are: put
        the first placement where the steps want it (`sharding.move.put_like`).

        Raises what a program raises, such as a lack of memory; ValueError if the stacks do not have the slots. Then the
        rearrangement is abandoned, every layer stays as it is in the arguments, and the next one begins in its time.
        """
        self._advances += 1
        under_way = self._current is not None or bool(self._layers)
        try:
            if self._advances % self.cfg.interval == 0 and not under_way:
                self._begin()
            if (self._advances + self.cfg.window) % self.cfg.interval == 0:
                self._records = {kind: clear_record(record) for kind, record in self._records.items()}
            return self._go_on(params, placement) if under_way else (params, placement)
        except BaseException:
            self.abandon()
            self._failures += 1
            raise

    def abandon(self) -> None:
        """Drops the rearrangement that is under way, if any; layers that were changed over stay so."""
        self._snapshot, self._current = [], None
        self._layers.clear()

    def warm_up(self, params: Params, placement: ExpertPlacement) -> None:
        """Runs the programs that balancing needs, without effect; call after `record` has been for every kind of step.

        Raises as `advance`.
        """
        stacks = self._experts(params, 0)
        first, owners = np.int32(0), self.owners[0]
        for kind, record in self._records.items():
            self._records[kind] = clear_record(copy_arrays(set_owners(record, first, owners)))
        spare = self._copy(copy_arrays(stacks), stacks, [])
        jax.block_until_ready((spare, self._with_layer(placement, first, owners)))

    def metrics(self) -> BalanceMetrics:
        """Its state; waits for the recorded steps. To be called from the thread that records."""
        ranks, k = self.solver.ranks, self.experts_per_token
        return BalanceMetrics(
            balancedness={
                kind: balancedness(record, ranks=ranks, experts_per_token=k) for kind, record in self._records.items()
            },
            rearrangements=self._rearrangements,
            experts_moved=self._moved,
            layers_left=len(self._layers),
            rearranged_at=self._begun_at,
            failures=self._failures,
        )

    def _begin(self) -> None:
        # Copies, because the records go on; read in the next advance, when the last step is done.
        self._snapshot = [copy_arrays(record) for record in self._records.values()]
        for leaf in jax.tree.leaves(self._snapshot):
            leaf.copy_to_host_async()
        self._layers.extend(range(len(self.owners)))
        self._rearrangements += 1
        self._begun_at, self._moved = self._advances, 0

    def _go_on(self, params: Params, placement: ExpertPlacement) -> tuple[Params, ExpertPlacement]:
        if self._snapshot:
            self._loads = np.concatenate([recorded_loads(record) for record in self._snapshot])
            self._snapshot = []
        if self._current is not None:
            if not self._current.moves:
                return self._change_over(params, placement)
            self._move_some(params)
        else:
            self._choose(self._layers.popleft(), params)
        return params, placement

    def _choose(self, layer: int, params: Params) -> None:
        loads = self._loads[:, layer]
        if not loads.any():
            return
        before = self.owners[layer]
        owners = self.solver.solve(loads, before)
        targets = np.flatnonzero(owners != before).tolist()
        if targets:
            moves = collections.deque((int(np.argmax(before == owners[slot])), slot) for slot in targets)
            self._current = _Rearrangement(layer, owners, moves, copy_arrays(self._experts(params, layer)))

    def _move_some(self, params: Params) -> None:
        current = self._current
        batch = [current.moves.popleft() for _ in range(min(self.cfg.experts_per_step, len(current.moves)))]
        current.spare = self._copy(current.spare, self._experts(params, current.layer), batch)
        self._moved += len(batch)

    def _copy(self, spare: Any, stacks: Any, moves: list[tuple[int, int]]) -> Any:
        padding = [(0, self.owners.shape[1])] * (self.cfg.experts_per_step - len(moves))
        sources, targets = np.array(moves + padding, np.int32).T
        return copy_slots(spare, stacks, np.ascontiguousarray(sources), np.ascontiguousarray(targets))

    def _change_over(self, params: Params, placement: ExpertPlacement) -> tuple[Params, ExpertPlacement]:
        current = self._current
        # Had a copy failed on the device, it would raise here, and not in a step that needs the weights.
        jax.block_until_ready(current.spare)
        layer = np.int32(current.layer)
        owners = self.owners.copy()
        owners[layer] = current.owners
        records = {kind: set_owners(record, layer, current.owners) for kind, record in self._records.items()}
        placement = self._with_layer(placement, layer, current.owners)
        params = self._with_experts(params, current.layer, current.spare)
        # Nothing fails from here on: the caller gets what is noted here.
        self.owners, self._records, self._current = owners, records, None
        return params, placement

    def _with_layer(
        self, placement: ExpertPlacement, layer: np.int32, owners: Int32[np.ndarray, " slots"]
    ) -> ExpertPlacement:
        row = placement_from_owners(owners[None], self.experts, self.solver.ranks)
        return _set_layer(placement, layer, row)

    def _experts(self, params: Params, layer: int) -> Any:
        stacks = params[self.stack][layer]["ffn"]["experts"]
        slots = self.owners.shape[1]
        for path, leaf in jax.tree_util.tree_flatten_with_path(stacks)[0]:
            if leaf.shape[0] != slots:
                name = f"{self.stack}.{layer}.ffn.experts{jax.tree_util.keystr(path)}"
                raise ValueError(f"{name} {leaf.shape}: must have {slots} expert slots")
        return stacks

    def _with_experts(self, params: Params, layer: int, stacks: Any) -> Params:
        layers = params[self.stack]
        changed = {**layers[layer], "ffn": {**layers[layer]["ffn"], "experts": stacks}}
        return {**params, self.stack: {**layers, layer: changed}}


def spread_params(params: Params, owners: Int[np.ndarray, "layers slots"], stack: Stack = "layers") -> Params:
    """The parameters with the expert `owners[l, p]` in slot p of layer l of a stack, from ones with expert e in slot e.

    Layers are done one after the other and the stacks given consumed, so that a device holds at most one layer's
    experts twice.
    """
    layers = dict(params[stack])
    for i, layer in layers.items():
        stacks = layer["ffn"]["experts"]
        spread = jax.block_until_ready(spread_experts(stacks, owners[i]))
        for array in jax.tree.leaves(stacks):
            array.delete()
        layers[i] = {**layer, "ffn": {**layer["ffn"], "experts": spread}}
    return {**params, stack: layers}


@jax.jit
def _set_layer(placement: ExpertPlacement, layer: Int32[Array, ""], row: ExpertPlacement) -> ExpertPlacement:
    return jax.tree.map(lambda all_layers, one: all_layers.at[layer].set(one[0]), placement, row)
