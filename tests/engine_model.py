"""An executor that remembers, like the device does, and checks what it is told: for tests of the scheduler.

Pages hold the token of each position, slots the positions whose window keys they have. A sampled token is a function
of the token history as read from the pages, so a wrong page, a page given away too early or a lost token changes what
comes out.
"""

import collections
import copy
import dataclasses
import hashlib

import numpy as np

from dsv4jax.engine.plan import NEXT_TOKEN, RankResult, Sampled, Speculated, StepResult
from dsv4jax.engine.token_mask import MaskError

EOS = 1
VOCAB = 50


class Violation(BaseException):
    """The device was told something wrong. No Exception: the engine must not take it for a failing step."""


def next_token(history, seed, mask=None) -> int:
    """The token that follows a history, of those that the mask allows; EOS once in a while."""
    digest = hashlib.sha256(np.asarray(history, np.int32).tobytes() + repr(seed).encode()).digest()
    allowed = np.arange(VOCAB)
    if mask is not None:
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB])
    return int(allowed[digest[0] % len(allowed)])


def allows(mask, token) -> bool:
    """Whether a mask allows a token."""
    return mask is None or bool(mask[token // 32] >> (token % 32) & 1)


def mask_of(tokens):
    """The mask that allows some tokens."""
    bits = np.zeros(64, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


class ChainMask:
    """Allows eight tokens around a place that moves with every token: how far, depends on the token if it `waits`.

    Every third mask allows all, and each is that of `period` tokens. After `fail_after` tokens no mask can be made any
    more.
    """

    def __init__(self, waits: bool, fail_after: int = 10**6, period: int = 1):
        assert not (waits and period > 1)
        self.waits_for_tokens, self.fail_after, self.period = waits, fail_after, period
        self.count = self.place = 0
        self.made = {}

    pause_tokens = ()

    @property
    def unchanged_for(self):
        return max(1, min(self.period - self.count % self.period, self.fail_after - self.count))

    def along(self, drafts):
        masks, ahead = [self.next()], copy.copy(self)
        for draft in drafts:
            if not allows(masks[-1], draft):
                return [*masks, masks[-1]]
            try:
                ahead.push(draft)
                masks.append(ahead.next())
            except MaskError:
                break
        return masks

    def next(self, ahead=0):
        assert ahead == 0 or (ahead == 1 and not self.waits_for_tokens)
        count = self.count + ahead
        if count >= self.fail_after:
            raise MaskError("no mask any more")
        count //= self.period
        place = self.place if self.waits_for_tokens else 7 * count
        if count % 3 == 2:
            return None
        if (count, place) not in self.made:
            self.made[count, place] = mask_of((place + np.arange(8)) % VOCAB)
        return self.made[count, place]

    def push(self, token):
        if not allows(self.next(), token):
            raise Violation(f"token {token} was sampled against the mask")
        self.count, self.place = self.count + 1, (self.place + token) % VOCAB


class PausingMask(ChainMask):
    """Allows ten tokens, until one of two follows an even one: for three tokens it is then one that waits for them."""

    def __init__(self):
        super().__init__(waits=True)
        self.left, self.last, self.free = 0, 1, mask_of(np.arange(2, 12))

    waits_for_tokens = property(lambda self: self.left > 0 or self.last % 2 == 0, lambda self, _: None)
    unchanged_for = property(lambda self: 1 if self.left else 10**6)
    pause_tokens = property(lambda self: () if self.left else (8, 9))

    def next(self, ahead=0):
        assert not (ahead and self.waits_for_tokens)
        return super().next() if self.left else self.free

    def push(self, token):
        super().push(token)
        turns = not self.left and token in (8, 9) and self.last % 2 == 0
        self.left = 3 if turns else max(0, self.left - 1)
        self.last = token


def rollout(request, index) -> list[int]:
    """What choice `index` of a request must generate."""
    seed = None if request.sampling.seed is None else request.sampling.seed + index
    history, out = list(request.prompt), []
    mask = request.mask() if request.mask else None
    while len(out) < request.max_tokens:
        try:
            out.append(next_token(history, seed, mask and mask.next()))
        except MaskError:
            break
        if mask:
            mask.push(out[-1])
        history.append(out[-1])
        if (out[-1] == EOS and not request.ignore_eos) or out[-1] in request.stop_token_ids:
            break
    return out


class CheckingExecutor:
    """Runs plans against remembered pages and windows; the clock counts steps.

    Each draft is right with probability `acceptance`, and of the drafts that a step may leave out it verifies some.
    What is right under a mask, `futures` tell: whole token sequences that requests will have.
    """

    futures = ()

    def __init__(self, cfg, acceptance=0.6):
        self.cfg, self.acceptance = cfg, acceptance
        self.rng, self.predictions = np.random.default_rng(0), np.random.default_rng(1)
        self.fail_next = 0
        self.failures = 0
        self.failures_in_a_row = 0
        self.resets = -1
        self._queue = collections.deque()
        self._time = 0.0
        self.plans = []
        self.reset()

    def reset(self):
        cfg = self.cfg
        self.resets += 1
        self._queue.clear()
        self.pages = np.full((cfg.ranks, cfg.pages, cfg.page_size), -1, np.int64)
        self.windows = [[{} for _ in range(cfg.slots)] for _ in range(cfg.ranks)]
        self.next_tokens = np.full((cfg.ranks, cfg.slots), -1)
        self.seeds = [[None] * cfg.slots for _ in range(cfg.ranks)]
        self.masks = [[None] * cfg.slots for _ in range(cfg.ranks)]
        self.floors = np.zeros((cfg.ranks, cfg.slots), int)
        self.positions = np.zeros((cfg.ranks, cfg.slots), int)
        self.drafts = [[[] for _ in range(cfg.slots)] for _ in range(cfg.ranks)]  # behind the newest chosen token

    def now(self):
        return self._time

    def dispatch(self, plan):
        if self.fail_next == 1:
            self.fail_next = 0
            self.failures += 1
            self.failures_in_a_row += 1
            raise RuntimeError("injected failure in dispatch")
        self.plans.append(plan)
        try:
            results, *decoding = zip(*(self._run(rank, plan) for rank in range(len(plan.ranks))), strict=True)
        except AssertionError as error:
            raise Violation(f"step {plan.number}: {error}") from error
        decodes, speculation = map(_together, decoding)
        self._queue.append(StepResult(plan.number, results, 1.0, decodes=decodes, speculation=speculation))

    def wait(self):
        if self.fail_next == 2:
            self.fail_next = 0
            self.failures += 1
            self.failures_in_a_row += 1
            raise RuntimeError("injected failure in wait")
        self._time += 1
        self.failures_in_a_row = 0
        return self._queue.popleft()

    def _run(self, rank, step):
        cfg, plan = self.cfg, step.ranks[rank]
        of_all = (step.decodes, step.speculation)
        assert all(part is None or part.ranks.tolist() == sorted(part.ranks) for part in of_all)
        given, drafting = (part and part.of_rank(rank) for part in of_all)
        for start in plan.starts:
            self.windows[rank][start.slot] = {}
            self.next_tokens[rank, start.slot] = -1
            self.seeds[rank][start.slot] = start.sampling.seed
            self.masks[rank][start.slot] = None
        assert len({mask.slot for mask in plan.masks}) == len(plan.masks), "two masks for one slot"
        for mask in plan.masks:
            self.masks[rank][mask.slot] = mask.mask
        assert sum(-(-(p.end - p.start) // cfg.tile) * cfg.tile for p in plan.prefills) <= cfg.prefill_tokens
        assert len(plan.prefills) <= cfg.prefill_requests
        prefills = []
        for chunk in plan.prefills:
            assert chunk.start < chunk.end <= len(chunk.tokens)
            for position in range(chunk.start, chunk.end):
                self._write(rank, chunk.slot, chunk.pages, position, chunk.tokens[position], chunk)
            prefills.append(self._sample(rank, chunk.slot, chunk.pages, chunk.end))
            self._move(rank, chunk.slot, chunk.end)
        decodes = []
        if given is not None:
            assert len(set(given.slots.tolist())) == len(given.slots) <= cfg.slots
            columns = given.slots, given.starts, given.tokens, given.page_tables[rank]
            for slot, start, token, pages in zip(*columns, strict=True):
                if token == NEXT_TOKEN:
                    assert not cfg.tokens_on_host
                    token = self.next_tokens[rank, slot]
                    assert token >= 0, "a token was used before it was sampled"
                self._write(rank, slot, pages, int(start), token, None)
                decodes.append(self._sample(rank, slot, pages, int(start) + 1))
                self._move(rank, slot, int(start) + 1)
        speculation = None
        if drafting is not None:
            assert step.decodes is None and len(set(drafting.slots.tolist())) == len(drafting.slots)
            speculation = self._speculate(rank, drafting)
        for slot in plan.first_drafts:
            chunk = next(c for c in plan.prefills if c.slot == slot)
            assert chunk.end == len(chunk.tokens), "drafts in the middle of a prompt"
            self.drafts[rank][slot] = self._draft(rank, slot, chunk.pages, chunk.end)
        first_drafts = [self.drafts[rank][slot] for slot in plan.first_drafts]
        first_drafts = np.array(first_drafts, np.int32) if first_drafts else None
        return RankResult(_sampled(prefills), (None,) * len(prefills), first_drafts), _sampled(decodes), speculation

    def _move(self, rank, slot, position):
        """After a step without drafts."""
        self.positions[rank, slot], self.drafts[rank][slot] = position, []

    def _draft(self, rank, slot, pages, position):
        """Drafts behind the newest chosen token of a slot, which is at a position."""
        history = [*self._history(rank, pages, position), self.next_tokens[rank, slot]]
        known = next((f for f in self.futures if np.array_equal(f[: len(history)], history)), history)
        drafts = []
        for _ in range(self.cfg.drafts):
            place = len(history)
            token = known[place] if place < len(known) else next_token(history, self.seeds[rank][slot])
            if self.rng.random() >= self.acceptance:
                token = (token + 1) % VOCAB
            drafts.append(int(token))
            history.append(token)
        return drafts

    def _speculate(self, rank, s):
        width = self.cfg.drafts + 1
        verified, rows, next_drafts = [], [], []
        for slot, most, end, given, least, drafts, pauses, seen, pages in zip(
            s.slots.tolist(), s.positions.tolist(), s.ends.tolist(), s.tokens.tolist(), s.min_drafts, s.max_drafts,
            s.pause_tokens, s.seen, s.page_tables[rank], strict=True,
        ):  # fmt: skip
            assert 0 <= least <= drafts <= self.cfg.drafts
            position, token = int(self.positions[rank, slot]), int(self.next_tokens[rank, slot])
            assert token >= 0, "a token was used before it was sampled"
            assert position <= most <= end and (given != NEXT_TOKEN or seen <= position)
            if given != NEXT_TOKEN:
                assert position == most and drafts == 0
                token = given
            if position >= end or (token in pauses and position > seen):
                verified.append(0)
                rows.append([])
                next_drafts.append([VOCAB] * self.cfg.drafts)
                continue
            held = self.drafts[rank][slot]
            limit = min(drafts, len(held), end - position - 1)
            count = int(self.rng.integers(min(least, limit), limit + 1))
            tokens = []
            for place in range(count + 1):
                self._write(rank, slot, pages, position + place, token, None)
                token = self._sample(rank, slot, pages, position + place + 1, place)
                tokens.append(token)
                if place < count and (token != held[place] or token in pauses):
                    break
            for rejected in range(position + len(tokens), position + count + 1):
                self._write(rank, slot, pages, rejected, VOCAB, None)
            verified.append(count)
            rows.append(tokens)
            self.positions[rank, slot] = position + len(tokens)
            self.drafts[rank][slot] = self._draft(rank, slot, pages, position + len(tokens))
            next_drafts.append(self.drafts[rank][slot])
        return Speculated(
            counts=np.array([len(row) for row in rows], np.int32),
            verified=np.array(verified, np.int32),
            tokens=np.array([row + [0] * (width - len(row)) for row in rows], np.int32),
            logprobs=np.zeros((len(rows), width), np.float32),
            next_drafts=np.array(next_drafts, np.int32).reshape(len(rows), self.cfg.drafts),
            confidences=self.predictions.normal(0, 3, (len(rows), self.cfg.drafts)).astype(np.float32),
        )

    def _write(self, rank, slot, pages, position, token, chunk):
        size, window = self.cfg.page_size, self.windows[rank][slot]
        floor = chunk.window_floor if chunk else 0
        needed = range(max(floor, position - self.cfg.replay.window + 1), position)
        held = {p: window.get(p) for p in needed}
        if chunk is None or position > chunk.start:
            # In decode the whole window is there, apart from what lies before the replay of a hit.
            missing = [p for p in needed if held[p] is None]
            assert all(p < self.floors[rank, slot] for p in missing), f"window keys {missing} of slot {slot} missing"
        if chunk is not None and position == chunk.start:
            self.floors[rank, slot] = floor
            assert all(held[p] is not None for p in needed), "a chunk does not continue the one before"
        window[position] = token
        place = self.pages[rank, pages[position // size]]
        if chunk is not None and position < chunk.cached:
            assert place[position % size] == token, "a cached page holds another token"
        else:
            place[position % size] = token

    def _sample(self, rank, slot, pages, length, place=0):
        mask = self.masks[rank][slot]
        if mask is not None and mask.ndim == 2:
            mask = mask[place]
        token = next_token(self._history(rank, pages, length), self.seeds[rank][slot], mask)
        self.next_tokens[rank, slot] = token
        return token

    def _history(self, rank, pages, length):
        used = pages[: -(-length // self.cfg.page_size)]
        history = self.pages[rank, used].reshape(-1)[:length]
        assert (history >= 0).all(), "a page without content was read"
        return history


def _sampled(tokens):
    return Sampled(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)) if tokens else None


def _together(parts):
    """The results of all ranks as those of a step."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    columns = [[getattr(part, f.name) for part in given] for f in dataclasses.fields(given[0])]
    return type(given[0])(*(None if column[0] is None else np.concatenate(column) for column in columns))
