"""The executor that runs the model: plans to step batches, results back, nothing in between but dispatch."""

import collections
import dataclasses
import itertools
import logging
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from tqdm import tqdm

from dsv4jax.balance.balancer import ExpertBalancer
from dsv4jax.balance.metrics import BalanceMetrics
from dsv4jax.batch import (
    DecodeBucket,
    DecodeTokens,
    PrefillBucket,
    PrefillChunk,
    SpeculativeBatch,
    SpeculativeRequest,
    StepBatch,
    concatenate_batches,
)
from dsv4jax.engine.draft_room import DecodeTimes
from dsv4jax.engine.plan import (
    Decodes,
    Prefill,
    RankResult,
    RunningRequests,
    Sampled,
    SlotMask,
    SlotStart,
    Speculated,
    Speculation,
    StepPlan,
    StepResult,
)
from dsv4jax.engine.programs import Bucket, DraftBucket, Programs, cost_table, placement_names
from dsv4jax.engine.records import BalanceStats
from dsv4jax.engine.request import PromptLogprobs
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.sampling import request_rows
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.speculation import DraftOutput, SpeculativeOutput
from dsv4jax.steps import StepOutput

_log = logging.getLogger(__name__)
_BALANCE_EVERY = 100  # steps between two looks at how even the load is, each of which waits for the device
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_TIMED_STEPS = 5
_GREEDY = RequestSampling(temperature=0.0, seed=0)
_MODELS = {"layers": "target", "mtp": "draft"}
_PLACEMENTS = {"layers": "placement", "mtp": "draft_placement"}


@dataclasses.dataclass(eq=False)
class _Results:
    """What a program returned, over all ranks."""

    output: StepOutput | SpeculativeOutput | DraftOutput
    ranks: int
    tile: int = 1  # chunks of prompts begin at multiples of it in their rank's batch

    def of_rank(self, name: str, rank: int) -> np.ndarray:
        """The rank's rows of an array of the output, on the host."""
        array = np.asarray(getattr(self.output, name))
        rows = len(array) // self.ranks
        return array[rank * rows : (rank + 1) * rows]

    def rows(self, name: str, counts: Mapping[int, int]) -> np.ndarray:
        """The first rows of an array of the output of some ranks, so many of each."""
        return np.concatenate([self.of_rank(name, rank)[:count] for rank, count in counts.items()])


@dataclasses.dataclass(eq=False)
class _Dispatched:
    plan: StepPlan
    prefill: _Results | None
    decode: _Results | None
    speculation: _Results | None
    first_drafts: _Results | None
    at: float


class CompileCounter:
    """Counts compilations in this process from its creation on, until it is closed."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._seen)

    def close(self) -> None:
        """Counts no further."""
        jax.monitoring.unregister_event_duration_listener(self._seen)

    def _seen(self, event: str, _seconds: float, **_: object) -> None:
        self.count += event == _COMPILE_EVENT


class JaxExecutor:
    """Runs plans of all ranks of a layout: one program each for the prefills of a step, its decodes, those with drafts,
    and first drafts.

    A program runs on all ranks in the smallest bucket that holds each rank's part; a rank that has none takes part with
    a batch of nothing, which writes nothing. Of several processes, each of which gets the same plans, every one makes
    the batches of its own ranks, and all get the results.

    Args:
      params: on the devices of `programs.layout`.
      usable_ids: token ids from here on are never chosen (a vocabulary padded beyond the tokenizer).
      strict: a step during which anything was compiled fails; for tests of the promise that nothing is.
      balancers: rearrange the experts of the backbone layers and of the draft stages while steps run; `params` have
        them where these say. One for each kind that the programs have slots for.

    Raises:
      ValueError: `usable_ids` leaves no token, or more than the vocabulary has.
    """

    def __init__(
        self,
        params: Params,
        programs: Programs,
        *,
        usable_ids: int | None = None,
        strict: bool = False,
        balancers: Sequence[ExpertBalancer] = (),
    ):
        vocab = programs.cfg.vocab_size
        if usable_ids is not None and not 1 <= usable_ids <= vocab:
            raise ValueError(f"usable_ids = {usable_ids}: must be in 1..{vocab}, the vocabulary")
        self._params, self._programs = params, programs
        self._balancers = {balancer.stack: balancer for balancer in balancers}
        self._placements = {b.stack: jax.device_put(b.placement, programs.layout.on_all) for b in balancers}
        self.balance: dict[str, BalanceStats] = {}
        self._steps = 0
        self._usable_ids = vocab if usable_ids is None else usable_ids
        self._strict = strict
        self._tokens_on_host = programs.tables is not None
        self._ranks, self._local_ranks = programs.layout.ranks, programs.layout.local_ranks
        self._queue: collections.deque[_Dispatched] = collections.deque()
        self.compilations = CompileCounter()
        self.reset()

    def close(self) -> None:
        """Ends the counting of compilations, which otherwise goes on for as long as the process."""
        self.compilations.close()

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def reset(self) -> None:
        """Empties the cache and drops what is in flight."""
        self._queue.clear()
        programs = self._programs
        slots = programs.cache_cfg.slots
        self._cache = None  # freed before the new one is made
        self._cache = programs.init_cache()
        self._sampling = [[_GREEDY] * slots for _ in range(self._ranks)]
        # Newest token ids that were run, newest first; for Engram tables on the host.
        self._history: list[list[tuple[int, ...]]] = [[()] * slots for _ in range(self._ranks)]
        self._free_since = time.monotonic()

    def warm_up(self, progress: bool = True) -> None:
        """Runs every program once on nothing, so that the first request pays for no first execution.

        Raises what a program raises, such as a lack of memory.
        """
        programs = self._programs
        for bucket in tqdm(programs.buckets.steps, desc="warming up", unit="program", disable=not progress):
            output = self._run(bucket, [programs.nothing(bucket)] * len(self._local_ranks))
            jax.block_until_ready(output.tokens)
        self._start([SlotStart(0, np.zeros(1, np.int32), 0, _GREEDY, {})] * self._ranks)
        for rows, places in itertools.product(programs.buckets.masks, sorted({1, programs.mask_places})):
            by_place = np.zeros((places, ceil_div(programs.cfg.vocab_size, 32)), np.uint32)
            mask = SlotMask(programs.cache_cfg.slots, None if places == 1 else by_place)
            self._set_masks([(mask,) * rows] * self._ranks)
        for stack, balancer in self._balancers.items():
            balancer.warm_up(self._params, self._placements[stack])
        self._read_balance()
        self.compilations.count = 0
        self._free_since = time.monotonic()

    def measure_costs(self) -> list[DecodeTimes]:
        """Measures decode steps on short requests, with drafts and without. Empties the cache.

        Of several processes all call it together: they run the same steps, and each finds other times.

        Returns:
          What `set_costs` and `DraftRoom` take.

        Raises:
          ValueError: a bucket has pages for fewer tokens than are timed.
        """
        programs, times = self._programs, []
        for bucket in (*programs.buckets.decode, *programs.buckets.verify):
            most = bucket.requests * bucket.tokens_per_request
            totals = sorted({*(2**i for i in range(most.bit_length())), bucket.requests, most})
            seconds = {total: self._seconds_of(bucket, total) for total in totals}
            drafts = bucket.tokens_per_request - 1
            times.append(DecodeTimes(bucket.requests, bucket.pages, drafts, cost_table(bucket, seconds)))
        self.reset()
        return times

    def set_costs(self, times: Sequence[DecodeTimes]) -> None:
        """Lets steps with drafts choose by measured times how many to verify.

        Args:
          times: the same in all processes, see `broadcast.share_costs`.

        Raises:
          ValueError: those of a program with drafts that is not there.
        """
        for one in times:
            if one.drafts:
                self._programs.set_costs(one)

    def _seconds_of(self, bucket: DecodeBucket, total: int) -> float:
        """Time of a step in which each rank runs `total` tokens of as few requests as can be."""
        programs, width = self._programs, bucket.tokens_per_request
        size, pages = programs.cache_cfg.page_size, programs.cache_cfg.pages
        used = ceil_div((_TIMED_STEPS + 2) * width, size)
        count = ceil_div(total, width)
        rows: list[DecodeTokens | SpeculativeRequest] = []
        for slot in range(count):
            drafts = total // count + (slot < total % count) - 1
            own = (slot * used + np.arange(used, dtype=np.int32)) % pages
            if bucket in programs.buckets.verify:
                rows.append(SpeculativeRequest(slot, own, used * size, drafts, drafts, _GREEDY))
            else:
                rows.append(DecodeTokens((0,), 0, slot, own, _GREEDY))
        batches = [programs.batch(rows, bucket)] * len(self._local_ranks)
        self.reset()
        jax.block_until_ready(self._run(bucket, batches).tokens)  # with drafts: only these, there were none yet
        seconds = []
        for _ in range(_TIMED_STEPS):
            begin = time.monotonic()
            output = self._run(bucket, batches)
            jax.block_until_ready(output.tokens)
            seconds.append(time.monotonic() - begin)
        return float(np.median(seconds))

    def dispatch(self, plan: StepPlan) -> None:
        """Starts a step; results start their way back.

        Raises:
          ValueError: the plan is for another number of ranks.
          RuntimeError: something was compiled in strict mode.
        """
        if len(plan.ranks) != self._ranks:
            raise ValueError(f"a plan for {len(plan.ranks)} ranks: the programs are for {self._ranks}")
        compiled = self.compilations.count
        self._balance()
        at = time.monotonic()
        for starts in itertools.zip_longest(*(rank.starts for rank in plan.ranks)):
            self._start(starts)
        if any(rank.masks for rank in plan.ranks):
            self._set_masks([rank.masks for rank in plan.ranks])
        prefill = self._prefill([rank.prefills for rank in plan.ranks])
        decode = self._decode(plan.decodes) if plan.decodes is not None else None
        speculation = self._speculate(plan.speculation) if plan.speculation is not None else None
        first_drafts = self._draft_first([rank.first_drafts for rank in plan.ranks])
        self._queue.append(_Dispatched(plan, prefill, decode, speculation, first_drafts, at))
        if self._strict and self.compilations.count > compiled:
            raise RuntimeError(f"step {plan.number} compiled {self.compilations.count - compiled} programs")

    def wait(self) -> StepResult:
        """The oldest step's result; blocks until the device is done with it."""
        step = self._queue.popleft()
        results = tuple(self._result(step, rank) for rank in range(self._ranks))
        decodes = speculation = None
        if (given := step.plan.decodes) is not None:
            decodes = _sampled(step.decode, _requests(given), self._sampling_of(given))
        if (given := step.plan.speculation) is not None:
            speculation = _speculated(step.speculation, _requests(given), self._sampling_of(given))
        end = time.monotonic()
        gap = max(0.0, step.at - self._free_since)
        seconds = end - max(step.at, self._free_since)
        self._free_since = end
        return StepResult(step.plan.number, results, seconds, gap, decodes, speculation)

    def synchronize(self) -> None:
        """Waits until the devices have done every step, without a look at results."""
        jax.block_until_ready(self._cache)

    def _balance(self) -> None:
        """Goes on with rearranging experts.

        What fails there is no matter of the step's; but of several processes all must do the same.
        """
        self._steps += 1
        if self._steps % _BALANCE_EVERY == 0:
            self._read_balance()
        for stack, balancer in self._balancers.items():
            try:
                self._params, self._placements[stack] = balancer.advance(self._params, self._placements[stack])
            except Exception:
                if self._programs.layout.spans_processes:
                    raise
                _log.exception("the experts of the %s stay where they are: a rearrangement failed", _MODELS[stack])

    def _read_balance(self) -> None:
        self.balance = {_MODELS[stack]: _balance_stats(b.metrics()) for stack, b in self._balancers.items()}

    def _result(self, step: _Dispatched, rank: int) -> RankResult:
        plan, sampling, prefills = step.plan.ranks[rank], self._sampling[rank], None
        logprobs: tuple[PromptLogprobs | None, ...] = ()
        if plan.prefills:
            rows = {rank: len(plan.prefills)}
            prefills = _sampled(step.prefill, rows, [sampling[p.slot] for p in plan.prefills])
            if plan.prefills[0].prompt_logprobs >= 0:
                logprobs = _prompt_logprobs(step.prefill, rank, plan.prefills)
            else:
                logprobs = (None,) * len(plan.prefills)
        first_drafts = None
        if plan.first_drafts:
            first_drafts = step.first_drafts.of_rank("tokens", rank)[: len(plan.first_drafts)]
        return RankResult(prefills, logprobs, first_drafts)

    def _sampling_of(self, running: RunningRequests) -> list[RequestSampling]:
        pairs = zip(running.ranks.tolist(), running.slots.tolist(), strict=True)
        return [self._sampling[rank][slot] for rank, slot in pairs]

    def _start(self, starts: Sequence[SlotStart | None]) -> None:
        """Starts at most one request on each rank."""
        programs = self._programs
        rows = programs.start_rows([self._start_row(starts[rank]) for rank in self._local_ranks])
        self._cache = programs.start_request(self._cache, *programs.layout.put(rows))
        for rank, start in enumerate(starts):
            if start is not None:
                sampling = start.sampling
                if sampling.seed is None:
                    sampling = dataclasses.replace(sampling, seed=int(np.random.default_rng().integers(2**62)))
                self._sampling[rank][start.slot] = sampling

    def _start_row(self, start: SlotStart | None) -> tuple[np.ndarray, ...]:
        programs = self._programs
        if start is None:
            start = SlotStart(programs.cache_cfg.slots, np.zeros(0, np.int32), 0, _GREEDY, {})
        length = len(start.tokens)
        prompt, outputs = np.split(start.tokens, [length - start.generated])
        mask, counts, bias = request_rows(prompt, outputs, start.logit_bias, programs.cfg.vocab_size)
        bias[self._usable_ids :] = -np.inf
        return np.int32(start.slot), mask, counts, bias, np.int32(length)

    def _set_masks(self, masks: Sequence[tuple[SlotMask, ...]]) -> None:
        programs = self._programs
        words = ceil_div(programs.cfg.vocab_size, 32)
        most = max(map(len, masks))
        rows = min(n for n in programs.buckets.masks if n >= most)
        by_place = any(np.ndim(mask.mask) == 2 for rank in masks for mask in rank)
        places = programs.mask_places if by_place else 1
        local = [masks[rank] for rank in self._local_ranks]
        slots = np.full((len(local), rows), programs.cache_cfg.slots, np.int32)
        values = np.full((len(local), rows, places, words), 0xFFFFFFFF, np.uint32)
        for i, given in enumerate(local):
            for row, mask in enumerate(given):
                slots[i, row] = mask.slot
                if np.ndim(mask.mask) == 2:
                    values[i, row, : len(mask.mask)] = mask.mask
                elif mask.mask is not None:
                    values[i, row] = mask.mask
        arguments = programs.layout.put((slots.reshape(-1), values.reshape(-1, places, words)))
        self._cache = programs.set_allowed_tokens(rows, places)(self._cache, *arguments)

    def _prefill(self, ranks: Sequence[tuple[Prefill, ...]]) -> _Results | None:
        programs, chunks = self._programs, [chunk for rank in ranks for chunk in rank]
        if not chunks:
            return None
        tile, size = programs.buckets.prefill[0].tile, programs.cache_cfg.page_size
        bucket = programs.buckets.for_prefill(
            max(sum(ceil_div(c.end - c.start, tile) * tile for c in rank) for rank in ranks),
            max(map(len, ranks)),
            max(ceil_div(c.end, size) for c in chunks),
            chunks[0].prompt_logprobs >= 0,
        )
        output = self._run(bucket, [self._prefill_batch(i, ranks[i], bucket) for i in self._local_ranks])
        if self._tokens_on_host:
            for i, rank in enumerate(ranks):
                for c in rank:
                    self._history[i][c.slot] = tuple(c.tokens[max(0, c.end - self._lookback) : c.end].tolist()[::-1])
        return _Results(output, self._ranks, tile)

    def _prefill_batch(self, rank: int, chunks: tuple[Prefill, ...], bucket: PrefillBucket) -> StepBatch:
        programs = self._programs
        if not chunks:
            return programs.nothing(bucket)
        rows = [
            PrefillChunk(
                prompt=c.tokens,
                start=c.start,
                end=c.end,
                slot=c.slot,
                pages=c.pages,
                cached=c.cached,
                window_floor=c.window_floor,
                sampling=self._sampling[rank][c.slot],
            )
            for c in chunks
        ]
        return programs.batch(rows, bucket)

    def _decode(self, decodes: Decodes) -> _Results:
        programs = self._programs
        bucket = programs.buckets.for_decode(
            max(_requests(decodes).values()), ceil_div(int(decodes.starts.max()) + 1, programs.cache_cfg.page_size)
        )
        output = self._run(bucket, [self._decode_batch(i, decodes.of_rank(i), bucket) for i in self._local_ranks])
        if self._tokens_on_host:
            columns = (column.tolist() for column in (decodes.ranks, decodes.slots, decodes.tokens))
            for rank, slot, token in zip(*columns, strict=True):
                history = self._history[rank]
                history[slot] = (token, *history[slot])[: self._lookback]
        return _Results(output, self._ranks)

    def _decode_batch(self, rank: int, decodes: Decodes | None, bucket: DecodeBucket) -> StepBatch:
        programs, sampling, history = self._programs, self._sampling[rank], self._history[rank]
        if decodes is None:
            return programs.nothing(bucket)
        slots, starts, tokens = decodes.slots.tolist(), decodes.starts.tolist(), decodes.tokens.tolist()
        rows = [
            DecodeTokens((token,), start, slot, pages, sampling[slot], history[slot] if self._tokens_on_host else ())
            for token, start, slot, pages in zip(tokens, starts, slots, decodes.page_tables[rank], strict=True)
        ]
        return programs.batch(rows, bucket)

    def _speculate(self, speculation: Speculation) -> _Results:
        programs = self._programs
        bucket = programs.buckets.for_verify(
            max(_requests(speculation).values()),
            ceil_div(int(_reached(speculation).max()), programs.cache_cfg.page_size),
            int(speculation.max_drafts.max()),
        )
        batches = [self._speculative_batch(i, speculation.of_rank(i), bucket) for i in self._local_ranks]
        output = self._run(bucket, batches)
        return _Results(output, self._ranks)

    def _speculative_batch(self, rank: int, plan: Speculation | None, bucket: DecodeBucket) -> SpeculativeBatch:
        if plan is None:
            return self._programs.nothing(bucket)
        columns = (plan.slots, _reached(plan), plan.max_drafts, plan.min_drafts, plan.tokens, plan.seen)
        rows = [
            SpeculativeRequest(slot, pages, end, most, least, self._sampling[rank][slot], token, pauses, seen)
            for slot, end, most, least, token, seen, pauses, pages in zip(
                *(c.tolist() for c in columns), plan.pause_tokens, plan.page_tables[rank], strict=True
            )
        ]
        return self._programs.batch(rows, bucket)

    def _draft_first(self, ranks: Sequence[tuple[int, ...]]) -> _Results | None:
        if not any(ranks):
            return None
        most = max(map(len, ranks))
        bucket = min((b for b in self._programs.buckets.draft if b.requests >= most), key=lambda b: b.requests)
        batches = []
        for rank in self._local_ranks:
            rows = [
                SpeculativeRequest(slot, np.zeros(0, np.int32), 0, 0, sampling=self._sampling[rank][slot])
                for slot in ranks[rank]
            ]
            batches.append(self._programs.batch(rows, bucket))
        return _Results(self._run(bucket, batches), self._ranks)

    def _run(
        self, bucket: Bucket, batches: list[StepBatch] | list[SpeculativeBatch]
    ) -> StepOutput | SpeculativeOutput | DraftOutput:
        """One program, with a batch for each rank."""
        programs = self._programs
        batch = batches[0] if len(batches) == 1 else concatenate_batches(batches)
        batch = programs.layout.put(batch)
        placements = {_PLACEMENTS[stack]: placement for stack, placement in self._placements.items()}
        options = {name: placements[name] for name in placement_names(bucket) if name in placements}
        self._cache, output = programs.step(bucket)(self._params, self._cache, batch, **options)
        self._record_loads(bucket, output)
        names = ("tokens", "logprobs", "counts", "verified", "next_drafts", "confidences")
        read = ("tokens",) if isinstance(output, DraftOutput) else names
        for array in (getattr(output, name) for name in read if hasattr(output, name)):
            array.copy_to_host_async()
        return output

    def _record_loads(self, bucket: Bucket, output: StepOutput | SpeculativeOutput | DraftOutput) -> None:
        """Loads of experts; the first drafts of requests count as prefill."""
        draft = output if isinstance(output, DraftOutput) else getattr(output, "draft", None)
        loads = {} if draft is None else {"mtp": draft.expert_load}
        if draft is not output:
            loads["layers"] = output.expert_load
        kind = "prefill" if isinstance(bucket, PrefillBucket | DraftBucket) else "decode"
        for stack, balancer in self._balancers.items():
            if stack in loads:
                balancer.record(loads[stack], kind)

    @property
    def _lookback(self) -> int:
        return self._programs.cfg.engram_max_ngram_size - 1


def _balance_stats(metrics: BalanceMetrics) -> BalanceStats:
    return BalanceStats(
        measured={kind: b.measured for kind, b in metrics.balancedness.items()},
        uniform={kind: b.uniform for kind, b in metrics.balancedness.items()},
        rearrangements=metrics.rearrangements,
        experts_moved=metrics.experts_moved,
        failures=metrics.failures,
    )


def _requests(running: RunningRequests) -> dict[int, int]:
    """How many there are of each rank that has some."""
    return {rank: len(table) for rank, table in running.page_tables.items()}


def _sampled(results: _Results, rows: Mapping[int, int], sampling: list[RequestSampling]) -> Sampled:
    """The first token of so many rows of each rank, with the best ones if any request asks for them."""
    names = ["tokens", "logprobs"]
    if max(s.top_logprobs for s in sampling) > 0:
        names += ["top_tokens", "top_logprobs"]
    return Sampled(*(results.rows(name, rows)[:, 0] for name in names))


def _speculated(results: _Results, rows: Mapping[int, int], sampling: list[RequestSampling]) -> Speculated:
    """The tokens of so many rows of each rank, with the best ones if any request asks for them."""
    names = ["counts", "verified", "tokens", "logprobs", "next_drafts", "confidences"]
    if max(s.top_logprobs for s in sampling) > 0:
        names += ["top_tokens", "top_logprobs"]
    return Speculated(*(results.rows(name, rows) for name in names))


def _reached(speculation: Speculation) -> np.ndarray:
    """Tokens that each request may run at most, from its first on; its pages cover them."""
    return np.minimum(speculation.ends, speculation.positions + 1 + speculation.max_drafts)


def _prompt_logprobs(results: _Results, rank: int, chunks: tuple[Prefill, ...]) -> tuple[PromptLogprobs, ...]:
    names = ("prompt_logprobs", "prompt_top_tokens", "prompt_top_logprobs")
    arrays = [results.of_rank(name, rank) for name in names]
    parts, offset = [], 0
    for chunk in chunks:
        rows = slice(offset, offset + min(chunk.end, len(chunk.tokens) - 1) - chunk.start)
        logprobs, ids, values = (a[rows] for a in arrays)
        parts.append(PromptLogprobs(logprobs, ids[:, : chunk.prompt_logprobs], values[:, : chunk.prompt_logprobs]))
        offset += ceil_div(chunk.end - chunk.start, results.tile) * results.tile
    return tuple(parts)
