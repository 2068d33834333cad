"""The asyncio side of the engine: readers of every speed, every way to end, and an engine that dies."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time

import numpy as np
import pytest
from engine_model import EOS, VOCAB, ChainMask, CheckingExecutor, rollout
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import SMALL, Recorder, request

from dsv4jax.engine.async_engine import AsyncEngine
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.request import EngineStopped, QueueFull, RequestTooLarge
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.token_mask import MaskError
from dsv4jax.sampling_settings import RequestSampling

LARGE = dataclasses.replace(SMALL, slots=6, pages=700, max_model_len=400, max_admissions=6)


class PausedExecutor(CheckingExecutor):
    """Waits for permission before each result while `paused`; can break for good."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.go = threading.Event()
        self.go.set()
        self.broken = None
        self.seconds = 0.0

    def wait(self):
        self.go.wait(120)
        time.sleep(self.seconds)
        if self.broken is not None:
            raise self.broken
        return super().wait()


class Served:
    """An engine in its thread, and what is inside."""

    def __init__(self, cfg, **options):
        self.executor, self.observer = PausedExecutor(cfg), Recorder()
        self.engine = Engine(Scheduler(cfg), self.executor, self.observer)
        self.api = AsyncEngine(self.engine, self.observer, max_model_len=cfg.max_model_len, vocab_size=VOCAB, **options)

    async def until(self, condition):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "what was waited for did not come"
            await asyncio.sleep(0.002)

    def empty(self):
        api, stats = self.api, self.api.stats()
        tables = (api._streams, api._stream_of, api._announced_choices, api._announced_tokens, api._commands)
        return not any(tables) and stats.running == stats.waiting == stats.used_pages == 0


def run(test, cfg=SMALL, check_empty=True, **options):
    """Runs a coroutine against a served engine, and sees that nothing is left of its requests."""

    async def body():
        served = Served(cfg, **options)
        served.api.start()
        try:
            await test(served)
            if check_empty:
                await served.until(served.empty)
                served.engine.scheduler.check_integrity()
        finally:
            served.executor.go.set()
            served.api.shutdown()

    asyncio.run(asyncio.wait_for(body(), 180))


async def read(served, made, pause=0.0):
    """All of a request: token ids and finish reason per choice, and the chunks."""
    tokens, reasons, chunks = {i: [] for i in range(made.n)}, {}, []
    async for chunk in served.api.generate(made):
        assert chunk.index not in reasons, "a chunk after the end of its choice"
        chunks.append(chunk)
        tokens[chunk.index] += chunk.token_ids
        if chunk.finish_reason is not None:
            reasons[chunk.index] = chunk.finish_reason
        await asyncio.sleep(pause)
    return tokens, reasons, chunks


def endless(name="r", tokens=300, **options):
    return request([2, 3, 4], tokens, name, ignore_eos=True, **options)


def test_many_readers_get_what_they_asked_for():
    rng = np.random.default_rng(0)

    async def test(served):
        requests = [
            request(
                rng.integers(2, VOCAB, 1 + i % 20),
                12,
                f"r{i}",
                n=1 + i % 3,
                ignore_eos=i % 2 == 0,
                sampling=RequestSampling(seed=i),
            )
            for i in range(60)
        ]
        for made, (tokens, reasons, _) in zip(
            requests,
            await asyncio.gather(*(read(served, r, pause=0.001 * (i % 4)) for i, r in enumerate(requests))),
            strict=True,
        ):
            for index in range(made.n):
                expected = rollout(made, index)
                assert tokens[index] == expected
                ended = expected[-1] == EOS and not made.ignore_eos
                assert reasons[index] == ("stop" if ended else "length")
        assert len(served.observer.requests) == sum(r.n for r in requests)

    run(test)


def test_a_slow_reader_gets_few_large_chunks_and_holds_nobody_up():
    async def test(served):
        served.executor.seconds = 0.001
        slow = asyncio.create_task(read(served, endless("slow"), pause=0.2))
        tokens, _, chunks = await read(served, endless("fast"))
        assert len(chunks) > 50
        assert not slow.done()
        late, _, few = await slow
        assert late[0] == tokens[0] == rollout(endless(), 0)
        assert len(few) < 15 and max(len(c.token_ids) for c in few) > 50

    run(test, LARGE)


def test_a_chunk_carries_log_probabilities_cached_tokens_and_the_stop_token():
    async def test(served):
        prompt = np.arange(2, 42)
        sampling = RequestSampling(temperature=0.0, top_logprobs=0, seed=0)
        stop = rollout(request(prompt, 12, ignore_eos=True, sampling=sampling), 0)[3]
        made = request(prompt, 12, ignore_eos=True, sampling=sampling, stop_token_ids=(stop,))
        tokens, reasons, chunks = await read(served, made)
        assert tokens[0] == rollout(made, 0) and reasons[0] == "stop"
        counts = [len(c.token_ids) for c in chunks]
        assert [len(c.logprobs) for c in chunks] == [len(c.top_logprobs) for c in chunks] == counts
        assert (chunks[-1].stop_reason, chunks[0].cached_tokens) == (stop, 0)
        _, _, chunks = await read(served, made)
        assert chunks[0].cached_tokens == 34

    run(test)


def test_closing_the_iterator_aborts_all_choices():
    async def test(served):
        stream = served.api.generate(endless(n=2))
        first = await anext(stream)
        assert first.token_ids
        await stream.aclose()
        await served.until(served.empty)
        assert {r.finish_reason for r in served.observer.requests} == {"abort"}
        assert len(served.observer.requests) == 2

    run(test, LARGE)


@pytest.mark.parametrize("state", ["submitted", "prefilling", "decoding", "waiting", "following"])
@pytest.mark.parametrize("how", ["abort", "stop", "cancel"])
def test_every_way_to_end_works_in_every_state(state, how):
    async def test(served):
        scheduler, others = served.engine.scheduler, []
        served.executor.seconds = 0.004
        if state == "waiting":
            others = [asyncio.create_task(read(served, endless(f"o{i}", 60))) for i in range(scheduler.cfg.slots)]
            await served.until(lambda: scheduler.num_running == len(others))
        made = request(np.arange(350) % 40 + 2, 30, n=2, ignore_eos=True)
        task = asyncio.create_task(read(served, made))
        leader = None
        if state == "submitted":
            await served.until(lambda: served.api._streams)
        else:
            await served.until(lambda: "r" in served.api._streams and served.api._streams["r"].open[0].number >= 0)
            leader = served.api._streams["r"].open[0]
        if state == "waiting":
            assert leader in scheduler.waiting
        elif state in ("prefilling", "following"):
            await served.until(lambda: leader.slot >= 0)
            assert leader.first_token is None and scheduler.following == 1
        elif state == "decoding":
            await served.until(lambda: leader.first_token is not None)
        if how == "cancel":
            task.cancel()
        elif how == "abort":
            assert served.api.abort(["r", "unknown"]) == 1
        elif state == "following":
            served.api.stop("r", 1)
            tokens, reasons, _ = await task
            assert (tokens[0], reasons) == (rollout(made, 0), {0: "length"})
            return
        else:
            served.api.stop("r", 0)
            served.api.stop("r", 1)
            served.api.stop("r", 1)
        if how == "cancel":
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            tokens, reasons, _ = await task
            assert reasons == ({0: "abort", 1: "abort"} if how == "abort" else {})
            assert all(tokens[i] == rollout(made, i)[: len(tokens[i])] for i in range(2))
        for other in others:
            tokens, _, _ = await other
            assert tokens[0] == rollout(endless("o", 60), 0)
        records = [r.finish_reason for r in served.observer.requests if r.request_id == "r"]
        await served.until(lambda: len([r for r in served.observer.requests if r.request_id == "r"]) == 2)
        assert set(records) <= {"stop" if how == "stop" else "abort"}

    run(test, LARGE)


def test_a_choice_stopped_while_another_is_read_gives_no_more_chunks():
    async def test(served):
        served.executor.go.clear()
        stream = served.api.generate(endless(n=3))
        task = asyncio.ensure_future(anext(stream))
        await served.until(lambda: len(served.api._stream_of) == 3)
        served.executor.go.set()
        await task
        # Chunks of all choices are ready now; the reader of the first one stops the others.
        await asyncio.sleep(0.1)
        seen = [(await anext(stream)).index]
        for index in {0, 1, 2} - set(seen):
            served.api.stop("r", index)
        async for chunk in stream:
            seen.append(chunk.index)
        assert len(set(seen)) == 1

    run(test, LARGE)


def test_ids_in_use_are_refused_and_free_again_afterwards():
    async def test(served):
        stream = served.api.generate(endless())
        await anext(stream)
        with pytest.raises(ValueError, match="request_id 'r' is in use"):
            await anext(served.api.generate(endless()))
        served.api.abort(["r"])
        async for _ in stream:
            pass
        tokens, _, _ = await read(served, endless(tokens=5))
        assert tokens[0] == rollout(endless(tokens=5), 0)

    run(test, LARGE)


def test_what_cannot_be_taken_is_refused_and_reported():
    async def test(served):
        with pytest.raises(RequestTooLarge):
            await anext(served.api.generate(request(np.arange(60) % 40 + 2, 5)))
        served.executor.seconds = 0.004
        tasks = []
        for i in range(4):
            tasks.append(asyncio.create_task(read(served, endless(f"r{i}", 40))))
            await served.until(lambda count=i + 1: served.engine.scheduler.num_running == count)
        tasks += [asyncio.create_task(read(served, endless(f"w{i}", 40))) for i in range(2)]
        await served.until(lambda: served.engine.scheduler.num_waiting == 2)
        with pytest.raises(QueueFull, match="2 of at most 2 requests are waiting") as error:
            served.api.check(endless("more", 20))
        assert error.value.retry_after >= 1
        with pytest.raises(QueueFull):
            await anext(served.api.generate(endless("more", 20)))
        await asyncio.gather(*tasks)
        assert served.observer.rejections == ["too_large", "queue_full", "queue_full"]

    run(test, dataclasses.replace(SMALL, max_waiting=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": np.int32([5, -1])}, r"prompt\[1\] = -1: must be from 0 to 49"),
        ({"prompt": np.int32([VOCAB, 5])}, r"prompt\[0\] = 50: must be from 0 to 49"),
        ({"logit_bias": {VOCAB: 1.0}}, r"logit_bias\[50\] = 1.0: must be -100 to 100 for a token below 50"),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias\[-1\] = 1.0"),
        ({"logit_bias": {3: 100.5}}, r"logit_bias\[3\] = 100.5"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias\[3\] = nan"),
    ],
)
def test_values_that_would_fail_the_step_of_all_are_refused(change, message):
    async def test(served):
        bad = dataclasses.replace(endless("bad", 5), **change)
        with pytest.raises(ValueError, match=message):
            served.api.check(endless("good", 5), bad)
        with pytest.raises(ValueError, match=message):
            await anext(served.api.generate(bad))
        assert not served.executor.plans

    run(test)


def test_no_reader_hangs_when_the_engine_dies():
    async def test(served):
        stream = served.api.generate(endless())
        await anext(stream)
        waiting = [asyncio.create_task(read(served, endless(f"w{i}"))) for i in range(20)]
        await asyncio.sleep(0.02)
        served.executor.broken = SystemExit("the device is gone")
        begin = time.monotonic()
        with pytest.raises(EngineStopped, match="does not answer"):
            async for _ in stream:
                pass
        for task in waiting:
            with pytest.raises(EngineStopped):
                await task
        assert time.monotonic() - begin < 30  # of the 60 s that an engine may be silent
        assert not served.api.is_alive and not served.api.is_ready
        with pytest.raises(EngineStopped):
            served.api.check(endless())
        with pytest.raises(EngineStopped):
            await anext(served.api.generate(endless("late")))
        assert not served.api._streams and not served.api._announced_choices

    run(test, LARGE, check_empty=False)


def test_a_reader_sees_its_end_though_the_step_failed_that_was_made_meanwhile():
    async def test(served):
        class FailsWithItsStep(ChainMask):
            def next(self, ahead=0):
                try:
                    return super().next(ahead)
                except MaskError:
                    served.executor.fail_next = 1
                    raise

        mask = functools.partial(FailsWithItsStep, waits=True, fail_after=3)
        ends, other = await asyncio.gather(
            read(served, endless("ends", mask=mask, tokens=9)), read(served, endless("runs", tokens=9))
        )
        assert served.executor.failures == 1
        assert ends[1] == {0: "error"} and len(ends[0][0]) == 3
        assert other[1] == {0: "length"} and len(other[0][0]) == 9

    run(test)


def test_an_engine_whose_every_step_fails_ends_its_requests_and_then_itself():
    async def test(served):
        served.executor.broken = RuntimeError("no step works")
        tokens, reasons, chunks = await read(served, endless())
        assert (tokens, reasons) == ({0: []}, {0: "error"})
        assert chunks[-1].error == "the step that ran this request failed"
        for i in range(5):
            with contextlib.suppress(EngineStopped):
                await read(served, endless(f"r{i}"))
        await served.until(lambda: not served.api.is_alive)

    run(test, LARGE, check_empty=False)


def test_a_silent_engine_is_noticed():
    async def test(served):
        served.executor.go.clear()
        begin = time.monotonic()
        with pytest.raises(EngineStopped, match="does not answer"):
            await read(served, endless())
        assert time.monotonic() - begin < 30
        served.executor.go.set()
        await served.until(lambda: served.api.is_alive)
        tokens, _, _ = await read(served, endless("again", 5))
        assert tokens[0] == rollout(endless(tokens=5), 0)

    run(test, LARGE, health_timeout=4)


def test_warm_up_makes_it_ready():
    async def test(served):
        assert served.api.is_alive and not served.api.is_ready
        await served.api.warm_up()
        assert served.api.is_ready

    run(test)


def test_an_engine_without_a_first_token_is_not_ready():
    async def test(served):
        served.executor.broken = RuntimeError("no step works")
        with pytest.raises(EngineStopped, match="no token could be produced: the first request ended with 'error'"):
            await served.api.warm_up()
        assert not served.api.is_ready

    run(test, check_empty=False)


def test_before_the_start_nothing_is_taken():
    served = Served(SMALL)
    with pytest.raises(EngineStopped):
        served.api.check(endless(tokens=5))
    served.api.shutdown()


def test_drain_lets_running_requests_end():
    async def test(served):
        served.executor.seconds = 0.001
        task = asyncio.create_task(read(served, endless()))
        await served.until(lambda: served.api._stream_of)
        drain = asyncio.create_task(served.api.drain(60))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineStopped, match="shutting down"):
            served.api.check(endless("late"))
        await drain
        tokens, reasons, _ = await task
        assert (tokens[0], reasons) == (rollout(endless(), 0), {0: "length"})
        assert not served.api.is_alive and not served.api._streams and not served.api._stream_of
        assert served.api.stats().used_pages == 0

    run(test, LARGE, check_empty=False)


def test_drain_aborts_what_takes_too_long():
    async def test(served):
        served.executor.seconds = 0.05
        task = asyncio.create_task(read(served, endless()))
        await served.until(lambda: served.api._stream_of)
        begin = time.monotonic()
        await served.api.drain(0.2)
        assert time.monotonic() - begin < 10  # all steps take 15 s
        _, reasons, _ = await task
        assert reasons == {0: "abort"}
        assert not served.api._streams and not served.api._stream_of
        assert served.api.stats().used_pages == 0

    run(test, LARGE, check_empty=False)


def test_shutdown_ends_readers():
    async def test(served):
        served.executor.seconds = 0.01
        task = asyncio.create_task(read(served, endless()))
        await served.until(lambda: served.api._stream_of)
        served.api.shutdown()
        with pytest.raises(EngineStopped, match="has stopped"):
            await task

    run(test, LARGE, check_empty=False)


def test_a_long_prompt_is_prepared_beside_the_event_loop():
    cfg = dataclasses.replace(SMALL, pages=6000, max_model_len=20_000, prefill_tokens=20_000)

    async def test(served):
        made = request(np.random.default_rng(0).integers(2, VOCAB, 17_000), 3)
        task = asyncio.create_task(read(served, made))
        await asyncio.sleep(0)
        assert (served.api._announced_choices, served.api._announced_tokens) == (1, 17_000)
        with pytest.raises(ValueError, match="in use"):
            await anext(served.api.generate(made))
        tokens, _, _ = await task
        assert tokens[0] == rollout(made, 0)
        aborted = asyncio.create_task(read(served, made))
        await asyncio.sleep(0)
        assert served.api.abort(["r"]) == 1
        assert (await aborted)[:2] == ({0: []}, {0: "abort"})
        cancelled = asyncio.create_task(read(served, made))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    run(test, cfg)


def test_resetting_the_prefix_cache_forgets_it():
    async def test(served):
        made = request(np.arange(2, 42), 3)
        await read(served, made)
        assert served.api.stats().cached_pages > 0
        served.api.reset_prefix_cache()
        await served.until(lambda: served.api.stats().cached_pages == 0)
        _, _, chunks = await read(served, made)
        assert chunks[0].cached_tokens == 0

    run(test)


ACTIONS = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt
        st.integers(1, 15),  # max_tokens
        st.integers(1, 3),  # n
        st.sampled_from(["read", "close", "cancel", "abort", "stop"]),
        st.integers(0, 5),  # chunks read before
    ),
    min_size=1,
    max_size=15,
)


@settings(max_examples=60)
@given(actions=ACTIONS)
def test_no_mixture_of_endings_leaves_anything_behind(actions):
    async def one(served, name, prompt, max_tokens, n, how, after):
        made = request(np.arange(prompt) % 40 + 2, max_tokens, name, n=n)
        stream, got = served.api.generate(made), {i: [] for i in range(n)}
        try:
            async with contextlib.aclosing(stream):
                count = 0
                async for chunk in stream:
                    got[chunk.index] += chunk.token_ids
                    if count == after:
                        if how == "close":
                            break
                        if how == "cancel":
                            raise asyncio.CancelledError
                        if how == "abort":
                            served.api.abort([name])
                        if how == "stop":
                            served.api.stop(name, chunk.index)
                    count += 1
        except asyncio.CancelledError:
            pass
        for index, tokens in got.items():
            expected = rollout(made, index)
            assert tokens == expected if how == "read" else tokens == expected[: len(tokens)]

    async def test(served):
        await asyncio.gather(*(one(served, f"r{i}", *action) for i, action in enumerate(actions)))

    run(test)


def test_an_idle_engine_that_lost_a_page_stops_rather_than_go_on():
    async def test(served):
        await read(served, request([2, 3], 3))
        served.engine.scheduler.ranks[0].pool._free.pop()
        await served.until(lambda: not served.api.is_alive)
        with pytest.raises(EngineStopped):
            await read(served, request([2, 3], 3, "later"))

    run(test, check_empty=False)
