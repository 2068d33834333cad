"""How even the load of the ranks is, beside the same batches routed uniformly at random."""

import dataclasses
import functools
import math

import numpy as np
from jaxtyping import Float64, Int, Int32

from dsv4jax.balance.record import LoadRecord


@dataclasses.dataclass(frozen=True)
class Balancedness:
    """Mean load of the ranks / load of the busiest rank, averaged over the recorded steps and layers with tokens.

    Attributes:
      steps: how many the averages are over; both are NaN without any.
      measured: by the recorded loads, an expert's tokens split evenly over its replicas.
      uniform: of the same numbers of tokens if every token took k distinct experts uniformly at random, with equally
        many experts on each rank.
    """

    steps: int
    measured: float
    uniform: float


@dataclasses.dataclass(frozen=True)
class BalanceMetrics:
    """State of one `ExpertBalancer`.

    Attributes:
      balancedness: by kind of step.
      rearrangements: begun so far, those included that found nothing to move.
      experts_moved: in the newest, so far.
      layers_left: of the newest, still to be looked at.
      rearranged_at: number of the step at which the newest began; -1 = none yet.
      failures: rearrangements that were abandoned.
    """

    balancedness: dict[str, Balancedness]
    rearrangements: int
    experts_moved: int
    layers_left: int
    rearranged_at: int
    failures: int


def balancedness(record: LoadRecord, *, ranks: int, experts_per_token: int) -> Balancedness:
    """Of the newest steps of a record, at most its window; copies to the host."""
    steps = min(int(record.steps), record.routed.shape[0])
    routed, busiest = np.asarray(record.routed)[:steps], np.asarray(record.busiest)[:steps]
    used = routed > 0
    if not used.any():
        return Balancedness(0, math.nan, math.nan)
    measured = np.mean(routed[used] / ranks / busiest[used])
    experts = record.totals.shape[1]
    uniform = uniform_balancedness(routed[used] / experts_per_token, experts_per_token, experts, ranks)
    return Balancedness(steps, float(measured), float(np.mean(uniform)))


def uniform_balancedness(
    tokens: Int[np.ndarray, " n"] | Float64[np.ndarray, " n"], k: int, experts: int, ranks: int
) -> Float64[np.ndarray, " n"]:
    """Expected balancedness when each of `tokens` tokens, at least 1, takes k distinct experts uniformly at random.

    Sampled token by token at powers of two, interpolated in between.
    """
    exponents = np.log2(tokens)
    grid = np.arange(math.floor(exponents.min()), math.ceil(exponents.max()) + 1)
    values = [_sampled_imbalance(2 ** int(e), k, experts, ranks) for e in grid]
    return 1 / np.interp(exponents, grid, values)


@functools.cache
def _sampled_imbalance(tokens: int, k: int, experts: int, ranks: int) -> float:
    """1 / mean of mean load / load of the busiest rank."""
    rng = np.random.default_rng([tokens, k, experts, ranks])
    samples = []
    for _ in range(min(400, max(4, 2**18 // tokens))):
        by_rank = np.bincount(uniform_picks(rng, tokens, k, experts).reshape(-1) * ranks // experts, minlength=ranks)
        samples.append(by_rank.mean() / by_rank.max())
    return float(1 / np.mean(samples))


def uniform_picks(rng: np.random.Generator, tokens: int, k: int, experts: int) -> Int32[np.ndarray, "k tokens"]:
    """k distinct experts per token, ascending; all sets are equally likely."""
    chosen: list[np.ndarray] = []
    for j in range(k):
        # The pick-th of the experts that are left: step over those chosen, then insert it among them.
        pick = rng.integers(experts - j, size=tokens, dtype=np.int32)
        for earlier in chosen:
            pick += pick >= earlier
        for i, earlier in enumerate(chosen):
            chosen[i], pick = np.minimum(earlier, pick), np.maximum(earlier, pick)
        chosen.append(pick)
    return np.stack(chosen)
