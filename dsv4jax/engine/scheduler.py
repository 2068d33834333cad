"""Which requests run in the next step: pure policy over queues, slots and pages. No device, no clock, no threads.

One scheduler decides for all data-parallel ranks, which run each step together; a rank without work has an empty part
in it. One step may carry prefill chunks and the next tokens of every running request. The order of events for each step
is `schedule`, dispatch, later `update`; other steps may be in flight in between, so that a choice may have tokens that
only the device knows, and a finished or preempted one may still be computed once more, which nobody reads. With drafts
a step brings a choice one token or several, and while it is in flight the host does not know how many; see `decoding`.

A waiting request goes to a rank with a free slot and pages for it, and of these to the one that will have the least
load with it. Load is counted in tokens of prefill: those left to run, 256 more for each running request, 1/64 more for
each token in its pages. What the request finds in the prefix cache of a rank is not left to run there, so a prefix of n
tokens draws requests to its rank until that has n more load than another one; the next request then takes the prefix
there, and from then on it is found in both. Of equal ranks the first is taken; nothing is random.

Promises, tested with random schedules: a request that passes `check` finishes; of two waiting requests the earlier is
overtaken at most `max_overtakes` times; on each rank the best running request is never preempted; when nothing runs,
every slot is free and no page is held.
"""

import bisect
import collections
import dataclasses

from dsv4jax.engine.chunking import plan_chunks
from dsv4jax.engine.decoding import Decoding
from dsv4jax.engine.draft_room import DraftRoom
from dsv4jax.engine.draft_totals import DraftCounter
from dsv4jax.engine.in_flight import InFlight, Update
from dsv4jax.engine.page_pool import PrefixHasher
from dsv4jax.engine.plan import Decodes, Prefill, Speculation, StepPlan, StepResult
from dsv4jax.engine.rank import Failures, Rank
from dsv4jax.engine.request import (
    FinishReason,
    GenerationRequest,
    QueueFull,
    RequestTooLarge,
    TooManyChoices,
    TooManyDrafts,
)
from dsv4jax.engine.results import Results
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.sequence import Sequence
from dsv4jax.engine.slots import Slots

_SCAN = 64  # waiting requests looked at per step


class Scheduler:
    """Queues, admission, and one `Rank` for each data-parallel rank.

    Args:
      room: chooses for how many drafts steps have room; None: for as many as there are.
    """

    def __init__(self, cfg: SchedulerConfig, room: DraftRoom | None = None):
        self.cfg = cfg
        self.waiting: list[Sequence] = []  # in the order of `_key`
        self.waiting_tokens = 0  # of them
        self.following = 0  # choices that wait for their request's first choice
        slots = Slots.empty(cfg)
        self.ranks = [Rank(cfg, i, slots) for i in range(cfg.ranks)]
        self.drafts = DraftCounter(cfg.drafts)
        self._room = room
        self.preemptions = 0
        self._hasher = PrefixHasher(cfg.page_size, cfg.max_model_len, cfg.namespace)
        self._decoding = Decoding(cfg, slots, self.ranks, self.drafts, room)
        self._results = Results(cfg, slots, self.ranks, self.drafts, room, self._hasher)
        self._arrivals = 0
        self._steps = 0
        self._prompt_logprobs = False  # whether the newest step with prefill returned them
        self._in_flight: collections.deque[InFlight] = collections.deque()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self.following

    @property
    def num_running(self) -> int:
        return sum(rank.num_running for rank in self.ranks)

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache, each choice once."""
        return sum(rank.prefix_queries for rank in self.ranks)

    @property
    def prefix_hits(self) -> int:
        """Those of them that no step had to run."""
        return sum(rank.prefix_hits for rank in self.ranks)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def check(self, *requests: GenerationRequest, announced_choices: int = 0, announced_tokens: int = 0) -> None:
        """Whether the requests can be taken together, besides others that are announced but not submitted yet.

        Raises:
          RequestTooLarge: one of them could never run here, or together they have more choices than may wait;
            `TooManyDrafts` and `TooManyChoices` are its kinds that the size of the context does not explain.
          ValueError: a request must run on a rank that is not there.
          QueueFull: too much is waiting already.
        """
        cfg = self.cfg
        for request in requests:
            if request.rank is not None and not 0 <= request.rank < cfg.ranks:
                raise ValueError(f"rank = {request.rank}: must be 0 to {cfg.ranks - 1}, or None")
            self._check_size(request)
        choices = sum(request.n for request in requests)
        if choices > cfg.max_waiting:
            raise TooManyChoices(f"{choices} choices are asked for at once, this engine lets {cfg.max_waiting} wait")
        waiting = self.num_waiting + announced_choices
        if waiting + choices > cfg.max_waiting:
            raise QueueFull(f"{waiting} of at most {cfg.max_waiting} requests are waiting")
        tokens = self.waiting_tokens + announced_tokens
        prompts = sum(len(request.prompt) for request in requests)
        if tokens and tokens + prompts > cfg.max_waiting_tokens:  # an empty queue takes any request that fits at all
            raise QueueFull(f"{tokens} tokens are waiting: {prompts} more exceed the limit of {cfg.max_waiting_tokens}")

    def _check_size(self, request: GenerationRequest) -> None:
        cfg = self.cfg
        if (request.drafts or 0) > cfg.drafts:
            most = f"makes at most {cfg.drafts}" if cfg.drafts else "makes none"
            raise TooManyDrafts(f"drafts = {request.drafts}: this engine {most}")
        prompt, total = len(request.prompt), len(request.prompt) + request.max_tokens
        if total > cfg.max_model_len:
            raise RequestTooLarge(
                f"prompt of {prompt} tokens and max_tokens = {request.max_tokens} exceed the context of"
                f" {cfg.max_model_len} tokens"
            )
        if (pages := -(-total // cfg.page_size)) > cfg.pages:
            raise RequestTooLarge(
                f"prompt of {prompt} tokens and max_tokens = {request.max_tokens} need {pages} pages of"
                f" {cfg.page_size} tokens, this engine has {cfg.pages}"
            )

    def prepare(self, request: GenerationRequest) -> list[Sequence]:
        """The request's choices, to be given to `submit`; safe to call from any thread."""
        state, keys = self._hasher.start(request.cache_salt), []
        if self.cfg.prefix_cache:
            state, keys = self._hasher.extend(state, request.prompt, 0)
        seed = request.sampling.seed
        return [
            Sequence(
                request=request,
                index=index,
                number=-1,
                arrived=0.0,
                sampling=request.sampling
                if seed is None
                else dataclasses.replace(request.sampling, seed=_int64(seed + index)),
                mask=request.mask() if request.mask else None,
                page_state=state,
                page_keys=list(keys) if index else keys,
            )
            for index in range(request.n)
        ]

    def submit(self, sequences: list[Sequence], now: float) -> None:
        """Puts the choices of one request into the queue."""
        leader, *followers = sequences
        for sequence in sequences:
            sequence.number, sequence.arrived = self._arrivals, now
            self._arrivals += 1
        if self.cfg.prefix_cache and leader.request.prompt_logprobs < 0:
            leader.followers = followers
            self.following += len(followers)
            for sequence in followers:
                sequence.leader = leader
            followers = []
        for sequence in (leader, *followers):
            self._enqueue(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Ends a choice in whatever state it is; its slot and pages are free at once."""
        if sequence.finish_reason is not None:
            return
        if sequence.slot >= 0:
            self.ranks[sequence.rank].remove(sequence)
        elif sequence in self.waiting:
            self._dequeue(sequence)
        else:
            sequence.leader.followers.remove(sequence)
            self.following -= 1
        sequence.finish_reason, sequence.error = reason, error
        self._release_followers(sequence)

    def schedule(self, now: float) -> tuple[StepPlan | None, list[Sequence]]:
        """The next step, or None if there is nothing to run now; and choices that failed while it was made."""
        self._admit(now)
        prefill = any(rank.prefilling for rank in self.ranks)
        runnable = self._decoding.runnable()
        decode = runnable.size > 0
        both = prefill and decode
        prefill &= not both or self._steps % self.cfg.prefill_every == 0
        decode &= not both or self._steps % self.cfg.decode_every == 0
        failed: Failures = []
        planned = self._decoding.plan(runnable, failed, self._preempt) if decode else None
        prefills = self._plan_prefills(failed) if prefill else [()] * len(self.ranks)
        for sequence, error in failed:
            self.finish(sequence, "error", error)
        ended = [sequence for sequence, _ in failed]
        if planned is None and not any(prefills):
            return None, ended
        told, running = planned or (None, None)
        plain = self._room is not None and self._room.plain
        parts = [rank.take_plan(chunks, plain) for rank, chunks in zip(self.ranks, prefills, strict=True)]
        plans, in_flight = zip(*parts, strict=True)
        decodes, speculation = (told if isinstance(told, kind) else None for kind in (Decodes, Speculation))
        step = StepPlan(self._steps, plans, decodes, speculation)
        self._in_flight.append(InFlight(self._steps, in_flight, running))
        self._steps += 1
        return step, ended

    def update(self, result: StepResult, now: float) -> Update:
        """Takes the result of the oldest step in flight."""
        flight = self._in_flight.popleft()
        if flight.number != result.number:
            raise ValueError(f"result of step {result.number}, but the oldest step in flight is {flight.number}")
        update = self._results.take(flight, result, now)
        for sequence, reason, error in update.finished:
            self.finish(sequence, reason, error)
        for sequence in update.first_tokens:
            self._release_followers(sequence)
        return update

    def recover(self, limit: int) -> list[Sequence]:
        """After a failed step: every running choice starts anew, and nothing is cached.

        Returns those that end instead, because it was the failure number `limit` they took part in.
        """
        blamed = {id(s) for flight in self._in_flight for s in flight.sequences()}
        self._in_flight.clear()
        given_up = []
        for rank in self.ranks:
            for sequence in rank.sequences():
                sequence.failures += id(sequence) in blamed
                if sequence.failures >= limit:
                    given_up.append(sequence)
                else:
                    self._preempt(sequence)
            rank.pool.forget_prefixes()
        for sequence in given_up:
            self.finish(sequence, "error", "the step that ran this request failed")
        return given_up

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        for rank in self.ranks:
            rank.pool.forget_prefixes()

    def check_integrity(self) -> None:
        """Raises AssertionError if slots or pages are lost, shared wrongly, or held without need."""
        for rank in self.ranks:
            rank.check_integrity()
        for sequence in self.waiting:
            assert sequence.slot < 0 and not sequence.pages, f"request {sequence.number} waits but holds pages"
        assert self.waiting_tokens == sum(s.length for s in self.waiting), "the waiting tokens are counted wrongly"
        running = [sequence for rank in self.ranks for sequence in rank.sequences()]
        following = sum(len(sequence.followers) for sequence in (*self.waiting, *running))
        assert following == self.following, f"{following} choices wait for their first one, {self.following} counted"

    def choose(self, fits: list[tuple[Rank, list[int]]], loads: list[float]) -> tuple[Rank, list[int]]:
        """Of the ranks that a request fits, each with the pages found there, the one that takes it: see the module.

        Args:
          fits: in ascending order of ranks; at least one.
          loads: of all ranks.
        """
        return min(fits, key=lambda fit: loads[fit[0].number] - fit[0].saved_tokens(fit[1]))

    def _plan_prefills(self, failed: Failures) -> list[tuple[Prefill, ...]]:
        chunks = plan_chunks([rank.ready_prefills(failed) for rank in self.ranks], self.cfg, self._prompt_logprobs)
        first = next((sequence for rank in chunks for sequence, _ in rank), None)
        if first is not None:
            self._prompt_logprobs = first.request.prompt_logprobs >= 0
        return [rank.plan_prefills(part, self._steps) for rank, part in zip(self.ranks, chunks, strict=True)]

    def _admit(self, now: float) -> None:
        admitted = 0
        if not self.waiting or not any(rank.free_slots for rank in self.ranks):
            return
        loads = [rank.load for rank in self.ranks]
        for sequence in self.waiting[:_SCAN]:
            if admitted == self.cfg.max_admissions * len(self.ranks):
                break
            asked = sequence.request.rank
            ranks = self.ranks if asked is None else [self.ranks[asked]]
            found = [(rank, rank.match(sequence)) for rank in ranks]
            fits = [(rank, pages) for rank, pages in found if pages is not None]
            if not fits:
                if sequence.overtaken >= self.cfg.max_overtakes:
                    break
                continue
            rank, pages = self.choose(fits, loads)
            self._dequeue(sequence)
            rank.admit(sequence, pages, now)
            loads[rank.number] = rank.load
            admitted += 1
            for other in [o for o in self.waiting if o.number < sequence.number]:
                other.overtaken += 1
                if other.overtaken == self.cfg.max_overtakes:
                    self._dequeue(other)
                    self._enqueue(other)

    def _preempt(self, sequence: Sequence) -> None:
        self.ranks[sequence.rank].remove(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=self._key)
        self.waiting_tokens += sequence.length

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.waiting_tokens -= sequence.length

    def _key(self, sequence: Sequence) -> tuple[bool, int, int]:
        return sequence.overtaken < self.cfg.max_overtakes, sequence.request.priority, sequence.number

    def _release_followers(self, sequence: Sequence) -> None:
        followers, sequence.followers = sequence.followers, []
        self.following -= len(followers)
        for follower in followers:
            self._enqueue(follower)


def _int64(value: int) -> int:
    """The value wrapped into the range of a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63
