"""How the prompts being prefilled share a step: which of them run in it, and how far.

All ranks run one step together, in one program, and it lasts as long as its fullest rank. Hence one decision for all:

* Prompt log-probabilities need a program of their own. While prompts with and without them are ready, wherever they
  are, the two kinds take turns.
* On each rank the prompts that waited longest share the tokens of the step evenly.
* Ranks that have work for the whole step finish together: a rank far inside a long prompt, whose tokens take longer
  each, runs fewer of them, down to as many as last as long as the full step of the quickest rank. Its own prompt loses
  nothing but the fixed time of more steps; the others need not wait for it. `SchedulerConfig.prefill_context` says how
  much longer. A rank that runs out of work bounds nobody.
"""

from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.sequence import Sequence

Chunks = list[tuple[Sequence, int]]
"""Choices, and the position up to which each is run."""


def plan_chunks(ready: list[list[Sequence]], cfg: SchedulerConfig, prompt_logprobs: bool) -> list[Chunks]:
    """The chunks of each rank; none for a rank where nothing is ready.

    Args:
      ready: the prompts of each rank that can run.
      prompt_logprobs: whether the last step with a choice between both kinds ran those with log-probabilities.
    """
    kinds = {_kind(s) for sequences in ready for s in sequences}
    kind = not prompt_logprobs if len(kinds) == 2 else True in kinds
    chosen = [
        sorted((s for s in sequences if _kind(s) == kind), key=_waited_longest)[: cfg.prefill_requests]
        for sequences in ready
    ]
    budget = cfg.prefill_tokens // cfg.tile
    chunks = [_share(sequences, budget, cfg.tile) for sequences in chosen]
    if cfg.prefill_context is None:
        return chunks
    costs = [sum(_cost(s.computed, end, cfg.prefill_context) for s, end in rank) for rank in chunks]
    full = [cost for sequences, cost in zip(chosen, costs, strict=True) if _tiles_left(sequences, cfg.tile) >= budget]
    for i, cost in enumerate(costs):
        if full and cost > min(full):
            used = min(budget, _tiles_left(chosen[i], cfg.tile))
            chunks[i] = _share(chosen[i], max(len(chosen[i]), int(used * min(full) / cost)), cfg.tile)
    return chunks


def _kind(sequence: Sequence) -> bool:
    return sequence.request.prompt_logprobs >= 0


def _waited_longest(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.last_prefill, sequence.request.priority, sequence.number


def _cost(start: int, end: int, context: int) -> float:
    """Time of a chunk in units of a prompt's first token."""
    return (end - start) * (1 + (start + end) / 2 / context)


def _tiles_left(sequences: list[Sequence], tile: int) -> int:
    return sum(-(-(s.prefill_end - s.computed) // tile) for s in sequences)


def _share(sequences: list[Sequence], budget: int, tile: int) -> Chunks:
    """Splits `budget` tiles, one per choice at least, evenly; what one does not need goes to the others."""
    needs = [_tiles_left([s], tile) for s in sequences]
    shares = [0] * len(needs)
    order = sorted(range(len(needs)), key=needs.__getitem__)
    for done, i in enumerate(order):
        shares[i] = min(needs[i], budget // (len(order) - done))
        budget -= shares[i]
    return [(s, min(s.prefill_end, s.computed + n * tile)) for s, n in zip(sequences, shares, strict=True)]
