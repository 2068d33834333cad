"""Where replicas of experts should be: from recorded loads and the placement in force to a better one. Host only.

A token takes replica `index` modulo count of an expert (`sharding.placement.chosen_slots`), so each replica is counted
with an equal share of the expert's tokens. What is minimised is the mean over the given steps of the load of the
busiest rank: the time of a layer is that of its busiest rank. One vector of loads, the mean, gives the classical form;
a vector per step also separates experts that are busy at the same time.

The search starts from the placement in force and makes only changes that pay, so it moves little:

1. Redundant slots go from the expert that needs its replica least to the one with the busiest replicas.
2. Experts on two ranks change places as long as that lowers the sum over steps and ranks of the squared load. This sum
   is Σ_r s_rᵀ C s_r with s_r the experts of rank r and C[a, b] the mean product of the loads of a and b, so the effect
   of every exchange is known without looking at the steps again.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int32, Shaped

from sharding.placement import check_owners

_REPLICA_GAIN = 0.1
"""Fraction by which the busiest replica's load must exceed what giving up another replica would make of that expert."""


@dataclasses.dataclass(frozen=True)
class Solver:
    """How placements are chosen.

    Args:
      ranks: devices that hold experts; slot p of P is on rank p // (P / ranks).
      nodes: groups of ranks/nodes consecutive ranks. Loads are first evened out between nodes, then within each, so
        that few experts cross from one to another.
      tolerance: deviations from the mean rank load below this fraction are left alone, and so is a placement that
        cannot be improved by at least this fraction.

    Raises:
      ValueError: a value is out of range, or the ranks do not divide over the nodes.
    """

    ranks: int
    nodes: int = 1
    tolerance: float = 0.01

    def __post_init__(self):
        if self.nodes < 1 or self.ranks < 1 or self.ranks % self.nodes:
            raise ValueError(f"nodes = {self.nodes}: must be positive and divide ranks = {self.ranks}")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance = {self.tolerance}: must be above 0 and below 1")

    def solve(
        self, loads: Shaped[np.ndarray, "steps experts"], owners: Int[np.ndarray, " slots"]
    ) -> Int32[np.ndarray, " slots"]:
        """Owners of one layer's slots: at least `tolerance` better than the given ones on these loads, or just these.

        Deterministic. An expert that stays on its rank stays in its slot. Solving from the result changes nothing.

        Args:
          loads: tokens routed to each expert, non-negative; one row per step or a single row.
          owners: in force, as `sharding.placement.check_owners` wants them.

        Raises:
          ValueError: the owners are not valid, or loads are negative, not finite or none.
        """
        loads = np.asarray(loads, np.float64)
        check_owners(owners[None], loads.shape[1], self.ranks)
        if not len(loads) or not np.all(np.isfinite(loads)) or loads.min() < 0:
            raise ValueError(f"loads {loads.shape}: must be finite, non-negative and of at least one step")
        # Exact for integer loads, whatever the order in which the products are added: every process gets the same.
        products = loads.T @ loads / len(loads)
        owners = owners.astype(np.int32)
        best, busiest = owners, mean_busiest(loads, owners, self.ranks)
        while True:
            found = _keep_slots(self._improved(products, best), owners, self.ranks)
            load = mean_busiest(loads, found, self.ranks)
            if load > busiest * (1 - self.tolerance) or busiest == 0:
                return best
            best, busiest = found, load

    def _improved(
        self, products: Float64[np.ndarray, "experts experts"], owners: Int32[np.ndarray, " slots"]
    ) -> Int32[np.ndarray, " slots"]:
        ranks = np.repeat(np.arange(self.ranks), len(owners) // self.ranks)
        nodes = ranks // (self.ranks // self.nodes)
        search = _Search(products, owners.copy(), ranks)
        search.reassign_replicas()
        if self.nodes > 1:
            search.exchange(nodes, np.zeros_like(nodes), self.tolerance)
        search.exchange(ranks, nodes, self.tolerance)
        return search.owners


def rank_loads(
    loads: Shaped[np.ndarray, "steps experts"], owners: Int[np.ndarray, " slots"], ranks: int
) -> Float[np.ndarray, "steps ranks"]:
    """Tokens each rank gets, an expert's tokens split evenly over its replicas."""
    share = loads / np.bincount(owners, minlength=loads.shape[1])
    return share[:, owners].reshape(len(loads), ranks, -1).sum(-1)


def mean_busiest(loads: Shaped[np.ndarray, "steps experts"], owners: Int[np.ndarray, " slots"], ranks: int) -> float:
    """Mean over the steps of the load of the busiest rank: what the solver minimises."""
    return float(rank_loads(loads, owners, ranks).max(1).mean())


class _Search:
    """A placement that is being improved: slot p is on rank `ranks[p]` and holds expert `owners[p]`."""

    def __init__(
        self,
        products: Float64[np.ndarray, "experts experts"],
        owners: Int32[np.ndarray, " slots"],
        ranks: Int[np.ndarray, " slots"],
    ):
        self.products, self.owners, self.ranks = products, owners, ranks
        self.counts = np.bincount(owners, minlength=len(products))
        self.on_rank: Bool[np.ndarray, "ranks experts"] = np.zeros((ranks[-1] + 1, len(products)), bool)
        self.on_rank[ranks, owners] = True

    def put(self, slot: int, expert: int) -> None:
        rank, before = self.ranks[slot], self.owners[slot]
        self.on_rank[rank, before], self.on_rank[rank, expert] = False, True
        self.counts[before] -= 1
        self.counts[expert] += 1
        self.owners[slot] = expert

    def reassign_replicas(self) -> None:
        """Step 1 of the module: lowers the load of the busiest replica, one redundant slot at a time."""
        total = np.sqrt(np.diag(self.products))
        while True:
            load = total / self.counts
            needy = int(np.where(self.counts < len(self.on_rank), load, -1).argmax())
            without = np.where(self.counts > 1, total / np.maximum(self.counts - 1, 1), np.inf)
            without[needy] = np.inf
            # By slot, as the needy expert must not be on the slot's rank already.
            price = np.where(self.on_rank[self.ranks, needy], np.inf, without[self.owners])
            if not price.min() < load[needy] * (1 - _REPLICA_GAIN):
                return
            by_rank = np.bincount(self.ranks, load[self.owners])
            slots = np.flatnonzero(price == price.min())
            self.put(int(slots[by_rank[self.ranks[slots]].argmin()]), needy)

    def exchange(self, groups: Int[np.ndarray, " slots"], within: Int[np.ndarray, " slots"], tolerance: float) -> None:
        """Step 2 of the module, between ranks or nodes.

        Args:
          groups: the group of each slot, whose loads are to become equal.
          within: slots with equal numbers may change places.
        """
        products = self.products / np.outer(self.counts, self.counts)
        own = np.diag(products)
        # Mean over steps of (load of a group) x (load of a replica of an expert).
        by_group = np.stack([products[self.owners[groups == g]].sum(0) for g in range(groups[-1] + 1)])
        mean_square = by_group[groups, self.owners].sum() / len(by_group)
        while found := self._best_exchange(products, own, by_group, groups, within, 2 * tolerance**2 * mean_square):
            p, q = found
            a, b = int(self.owners[p]), int(self.owners[q])
            self.put(p, b)
            self.put(q, a)
            change = products[b] - products[a]
            by_group[groups[p]] += change
            by_group[groups[q]] -= change

    def _best_exchange(
        self,
        products: Float64[np.ndarray, "experts experts"],
        own: Float64[np.ndarray, " experts"],
        by_group: Float64[np.ndarray, "groups experts"],
        groups: Int[np.ndarray, " slots"],
        within: Int[np.ndarray, " slots"],
        least: float,
    ) -> tuple[int, int] | None:
        """The two slots whose exchange takes most off the sum of squares, at least `least`, one in a busiest group."""
        owners, slots = self.owners, np.arange(len(self.owners))
        here = by_group[groups, owners]
        for group in np.argsort(-np.bincount(groups, here), kind="stable"):
            mine = slots[groups == group]
            a = owners[mine]
            others = by_group[:, a][groups].T
            change = 2 * (others - here[mine, None] + by_group[group, owners] - here)
            change += 2 * (own[a][:, None] + own[owners] - 2 * products[a][:, owners])
            barred = self.on_rank[:, a][self.ranks].T | self.on_rank[self.ranks[mine]][:, owners]
            barred |= (within != within[mine[0]]) | (groups == group)
            change[barred] = 0
            least_at = int(change.argmin())
            if change.flat[least_at] < -least:
                return int(mine[least_at // len(slots)]), least_at % len(slots)
        return None


def _keep_slots(
    owners: Int32[np.ndarray, " slots"], before: Int32[np.ndarray, " slots"], ranks: int
) -> Int32[np.ndarray, " slots"]:
    """The same experts on every rank, in the slots that they had there before."""
    result = before.reshape(ranks, -1).copy()
    for rank, wanted in enumerate(owners.reshape(ranks, -1)):
        stays = np.isin(result[rank], wanted)
        result[rank, ~stays] = np.sort(wanted[~np.isin(wanted, result[rank])])
    return result.reshape(-1)
