"""From plans to the programs' arguments and back over several ranks, with programs that only look at them."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_engine import CACHE, CFG, LENGTH, SCHEDULER, HalfMask
from engine_model import next_token, rollout
from golden import NOQUANT
from test_scheduler import Recorder, drain

from dsv4jax.batch import DecodeBucket, PrefillBucket
from dsv4jax.engine import programs as module
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.plan import SlotMask
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engram_hash import DEAD, rows_on_host
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.steps import StepOutput, decode_step, prefill_step, set_allowed_tokens, start_request

RANKS = 3


@dataclasses.dataclass(frozen=True)
class ThreeRanks:
    """What programs and executor need of a layout."""

    ranks: int = RANKS
    local_ranks: range = range(RANKS)
    mesh: str = "one"
    by_rank: None = None
    local_ranks: range = range(RANKS)

    def put(self, tree):
        return tree


class Tables:
    """Engram tables of which every row is its own number."""

    def lookup(self, rows):
        return (rows,)


TOKEN_MAP = (np.arange(CFG.vocab_size, dtype=np.int32) * 7 + 3) % CFG.engram_compressed_vocab_size


@dataclasses.dataclass(frozen=True)
class Call:
    kind: str
    arguments: tuple


class Fakes:
    """In place of compilation: each program keeps its arguments, and steps sample what `engine_model` says."""

    def __init__(self):
        self.calls: list[Call] = []
        self.scheduler: Scheduler | None = None
        self.engram_rows_checked = 0

    def lower(self, function, *_, **__):
        names = {prefill_step: "prefill", decode_step: "decode", start_request: "start", set_allowed_tokens: "masks"}
        kind = names.get(function)
        if kind is None:
            return Fake(lambda: "cache")
        return Fake(lambda *arguments: self.run(kind, arguments))

    def run(self, kind, arguments):
        self.calls.append(Call(kind, arguments))
        return "cache" if kind in ("start", "masks") else ("cache", self.sample(arguments[-1]))

    def sample(self, batch):
        rows = len(batch.slots)
        tokens = np.full((rows, 1), -7, np.int32)
        for row, sequence, ids in self.requests(batch):
            tokens[row] = next_token(ids, sequence.sampling.seed)
            if batch.engram_rows:
                self.check_engram_rows(batch, row, np.array(ids))
        zeros = jnp.zeros((rows, 1))
        return StepOutput(jnp.asarray(tokens), zeros, None, None, None, None, ())

    def requests(self, batch):
        """(row, choice, ids up to the end of what the step runs of it) of each request in a batch of all ranks."""
        for row, (slot, start, length) in enumerate(zip(batch.slots, batch.starts, batch.lengths, strict=True)):
            if length:
                sequence = self.scheduler.ranks[row // (len(batch.slots) // RANKS)]._sequences[slot]
                yield row, sequence, [sequence.token(p) for p in range(start + length)]

    def check_engram_rows(self, batch, row, ids):
        """Those of a request's tokens are those of the ids before each of them."""
        orders, length = CFG.engram_max_ngram_size, int(batch.lengths[row])
        known = np.concatenate([np.full(orders - 1, DEAD), TOKEN_MAP[ids]])
        ends = len(known) - length + np.arange(length)
        history = known[ends[:, None] - np.arange(orders)]
        rank = row // (len(batch.slots) // RANKS)
        first = rank * (len(batch.tokens) // RANKS) + int(batch.offsets[row])
        expected = rows_on_host(CFG, history, int(TOKEN_MAP[CFG.engram_pad_token_id]))
        np.testing.assert_array_equal(batch.engram_rows[0][first : first + length], expected)
        self.engram_rows_checked += length


class Fake:
    def __init__(self, run):
        self.run = run

    def __call__(self, *arguments):
        return self.run(*arguments)

    def compile(self):
        return self

    def memory_analysis(self):
        return None


@pytest.fixture
def fakes(monkeypatch):
    fakes = Fakes()
    monkeypatch.setattr(module, "_lower", fakes.lower)
    monkeypatch.setattr(module, "init_cache", lambda *_: jnp.zeros(1))
    return fakes


def serve(fakes, tables=None):
    """The programs, and plans and calls of each step while requests of many sizes run on three ranks."""
    buckets = make_buckets(
        CACHE, prefill_tokens=[16, 32], prefill_requests=2, decode_requests=[1, 2, 4], contexts=[40, 80, LENGTH]
    )
    token_map = None if tables is None else TOKEN_MAP
    programs = Programs(CFG, CACHE, buckets, NOQUANT, ThreeRanks(), tables, token_map, params={}, progress=False)
    executor = JaxExecutor({}, programs)
    executor.warm_up(progress=False)
    cfg = dataclasses.replace(SCHEDULER, ranks=RANKS, tokens_on_host=tables is not None, deterministic=False)
    engine = Engine(Scheduler(cfg), executor, Recorder(), depth=1)
    fakes.scheduler = engine.scheduler
    plans, calls, dispatch = [], [], executor.dispatch

    def noted(plan):
        del fakes.calls[:]
        dispatch(plan)
        plans.append(plan)
        calls.append(list(fakes.calls))

    executor.dispatch = noted
    rng, made = np.random.default_rng(0), []
    for i in range(12):
        prompt = rng.integers(2, 50, int(rng.integers(1, 100))).astype(np.int32)
        made += engine.submit(
            GenerationRequest(
                f"r{i}", prompt, int(rng.integers(1, 40)), n=1 + (i % 5 == 0), sampling=RequestSampling(seed=i)
            )
        )
        for _ in range(rng.integers(0, 4)):
            engine.step()
    drain(engine)
    executor.close()
    assert [s.generated for s in made] == [rollout(s.request, s.index) for s in made], "results of another rank or row"
    return programs, plans, calls


def test_a_step_is_one_call_of_each_program_for_all_ranks_in_the_smallest_shape_that_holds_the_fullest(fakes):
    programs, plans, calls = serve(fakes)
    shapes = collections.Counter()
    parts = set()
    for plan, made in zip(plans, calls, strict=True):
        starts = itertools.zip_longest(*(rank.starts for rank in plan.ranks))
        for call, expected in zip([c for c in made if c.kind == "start"], starts, strict=True):
            _, slots, *rows, lengths = call.arguments
            assert all(row.shape == (RANKS, CFG.vocab_size) for row in rows)
            assert slots.tolist() == [CACHE.slots if start is None else start.slot for start in expected]
            assert lengths.tolist() == [0 if start is None else len(start.tokens) for start in expected]
            parts.add(tuple(start is None for start in expected))
        counts = collections.Counter(call.kind for call in made)
        assert counts["prefill"] == any(rank.prefills for rank in plan.ranks)
        assert counts["decode"] == (plan.decodes is not None)
        for call in made:
            batch = call.arguments[-1]
            if call.kind == "prefill":
                chunks = [rank.prefills for rank in plan.ranks]
                tokens = max(sum(-(-(c.end - c.start) // 16) * 16 for c in rank) for rank in chunks)
                pages = max(-(-c.end // 8) for rank in chunks for c in rank)
                bucket = programs.buckets.for_prefill(tokens, max(map(len, chunks)), pages, False)
                assert batch.tokens.shape == (RANKS * bucket.tokens,)
            elif call.kind == "decode":
                fullest = np.bincount(plan.decodes.ranks).max()
                bucket = programs.buckets.for_decode(fullest, -(-int(plan.decodes.starts.max() + 1) // 8))
                assert batch.tokens.shape == (RANKS * bucket.requests,)
            else:
                continue
            assert batch.page_table.shape == (RANKS * bucket.requests, bucket.pages)
            assert (batch.num_slots, batch.page_size) == (CACHE.slots, CACHE.page_size)
            shapes[bucket] += 1
    assert len(parts) > 2, "ranks that start nothing"
    assert len([b for b in shapes if isinstance(b, PrefillBucket)]) > 2
    assert len([b for b in shapes if isinstance(b, DecodeBucket)]) > 2


def test_ids_that_may_be_chosen_are_some_of_the_vocabulary(fakes):
    buckets = make_buckets(CACHE, prefill_tokens=[16], prefill_requests=1, decode_requests=[4], contexts=[LENGTH])
    programs = Programs(CFG, CACHE, buckets, NOQUANT, ThreeRanks(), params={}, progress=False)
    for usable_ids in (0, CFG.vocab_size + 1):
        with pytest.raises(ValueError, match=rf"^usable_ids = {usable_ids}: must be in 1\.\.{CFG.vocab_size}"):
            JaxExecutor({}, programs, usable_ids=usable_ids)


def test_masks_of_all_ranks_go_to_their_slots_in_one_call(fakes):
    buckets = make_buckets(CACHE, prefill_tokens=[16], prefill_requests=1, decode_requests=[4], contexts=[LENGTH])
    programs = Programs(CFG, CACHE, buckets, NOQUANT, ThreeRanks(), params={}, progress=False)
    executor = JaxExecutor({}, programs)
    first, second = HalfMask().masks
    masks = [(), (SlotMask(2, first), SlotMask(0, None)), (SlotMask(2, second),)]
    executor._set_masks(masks)
    executor.close()
    _, slots, values = fakes.calls[-1].arguments
    none = CACHE.slots
    assert slots.reshape(RANKS, -1).tolist() == [[none] * 4, [2, 0, none, none], [2, none, none, none]]
    assert values.shape[1] == 1
    values = values.reshape(RANKS, 4, -1)
    assert np.array_equal(values[1, 0], first) and np.array_equal(values[2, 0], second)
    assert (values[1, 1] == 0xFFFFFFFF).all()


def test_several_processes_pass_the_arguments_of_one_each_those_of_its_own_ranks(fakes):
    programs, plans, calls = serve(fakes, Tables())
    fakes.sample = lambda batch: StepOutput(*[jnp.zeros((len(batch.slots), 1))] * 2, None, None, None, None, ())
    parts = []
    for local in (range(1), range(1, RANKS)):
        layout = ThreeRanks(local_ranks=local)
        own = Programs(CFG, CACHE, programs.buckets, NOQUANT, layout, Tables(), TOKEN_MAP, params={}, progress=False)
        executor = JaxExecutor({}, own)
        parts.append([])
        for plan in plans:
            del fakes.calls[:]
            executor.dispatch(plan)
            parts[-1].append(list(fakes.calls))
        executor.close()
    for whole, *processes in zip(calls, *parts, strict=True):
        for call, *others in zip(whole, *processes, strict=True):
            assert {other.kind for other in others} == {call.kind}
            first = 2 if call.kind in ("prefill", "decode") else 1  # behind parameters and cache
            arrays = [jax.tree.leaves(c.arguments[first:]) for c in (call, *others)]
            for one, *own in zip(*arrays, strict=True):
                np.testing.assert_array_equal(one, np.concatenate(own))


def test_host_tables_are_read_by_the_history_of_each_rank(fakes):
    serve(fakes, Tables())
    assert fakes.engram_rows_checked > 500
