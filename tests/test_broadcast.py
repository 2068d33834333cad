"""An engine over several processes: same calls everywhere, failures survived together or not at all, nobody hangs."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from channels import TWO_RANKS as CFG
from channels import Failures, channel_config, connected, free_port
from engine_model import CheckingExecutor, rollout
from test_recording import drive
from test_scheduler import Recorder, drain, request

from dsv4jax.engine.broadcast import BroadcastExecutor, follow, share_costs
from dsv4jax.engine.channel import FAILURE_EXIT_CODE, ChannelFailure, LeaderChannel
from dsv4jax.engine.connection import Kind
from dsv4jax.engine.draft_room import DecodeTimes, DraftRoom
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.recording import RecordingExecutor, schedule_difference
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.sampling_settings import RequestSampling

SEEDED = RequestSampling(seed=5)


@contextlib.contextmanager
def group(inners, **options):
    """(executor of process 0, what each follower ended with, failures by process), with one thread per follower."""
    with ThreadPoolExecutor(8) as pool, connected(len(inners), **options) as (leader, followers, failures):
        ends = [pool.submit(follow, *pair) for pair in zip(followers, inners[1:], strict=True)]
        executor = BroadcastExecutor(inners[0], leader)
        yield executor, ends, failures
        if leader.failure is None:
            shutting = threading.Thread(target=leader.shutdown)
            shutting.start()
            for end, follower in zip(ends, followers, strict=True):
                end.result(60)
                follower.close()
            shutting.join(60)
            assert failures == [[]] * len(inners)


def busy(executor, cfg=CFG):
    """The engine's outcome of a busy time without failures."""
    return [(s.generated, s.finish_reason) for s in drive(executor, cfg)]


def test_all_processes_make_the_same_calls_and_see_the_same_tokens():
    alone = RecordingExecutor(CheckingExecutor(CFG))
    expected = busy(alone)
    inners = [RecordingExecutor(CheckingExecutor(CFG)) for _ in range(3)]
    with group(inners) as (executor, _, _):
        assert busy(executor) == expected
    for inner in inners:
        assert [e.kind for e in inner.events] == [e.kind for e in alone.events]
        assert schedule_difference(alone.events, inner.events) is None
        for event, other in zip(alone.events, inner.events, strict=True):
            if event.result is not None:
                sampled = [(*(r.prefills for r in e.result.ranks), e.result.decodes) for e in (event, other)]
                tokens, others = ([s and s.tokens.tolist() for s in of_step] for of_step in sampled)
                assert tokens == others


def test_requests_without_a_seed_have_the_same_in_all_processes():
    inners = [CheckingExecutor(CFG) for _ in range(2)]
    with group(inners) as (executor, _, _):
        engine = Engine(Scheduler(CFG), executor, Recorder())
        for i in range(6):
            engine.submit(request(np.arange(2, 9), 4, f"r{i}", sampling=RequestSampling(seed=7 if i == 3 else None)))
        drain(engine)
    seeds = [[s.sampling.seed for p in inner.plans for r in p.ranks for s in r.starts] for inner in inners]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 6
    assert 7 in seeds[0] and None not in seeds[0]


DRAFTING = dataclasses.replace(CFG, drafts=4)


def times_of(*seconds):
    """Of steps with room for 0, 1 and 4 drafts, and some more for each token."""
    return [
        DecodeTimes(4, 16, k, np.float32(first + np.arange(1, 4 * (1 + k) + 2) / 30))
        for k, first in zip((0, 1, 4), seconds, strict=True)
    ]


class Measured(CheckingExecutor):
    """Of its drafts verifies what costs tell it, and keeps its results."""

    def __init__(self):
        super().__init__(DRAFTING)
        self.results = []

    def set_costs(self, times):
        self.rng = np.random.default_rng([*b"".join(one.seconds.tobytes() for one in times)])

    def wait(self):
        self.results.append(super().wait())
        return self.results[-1]


def test_steps_with_drafts_run_and_verify_in_all_processes_by_the_times_that_process_0_measured():
    """The others have measured that no drafts pay, and that all do."""
    inners = [Measured() for _ in range(3)]
    measured = [times_of(1, 1.2, 1.4), times_of(1, 9, 10), times_of(1, 1.01, 1.02)]

    def carry_out(channel, inner, times):
        inner.set_costs(share_costs(channel, times))
        follow(channel, inner)
        channel.close()

    with ThreadPoolExecutor(2) as pool, connected(3) as (leader, followers, failures):
        ends = [pool.submit(carry_out, *each) for each in zip(followers, inners[1:], measured[1:], strict=True)]
        times = share_costs(leader, measured[0])
        inners[0].set_costs(times)
        engine = Engine(Scheduler(DRAFTING, DraftRoom(times, 4, 2)), BroadcastExecutor(inners[0], leader), Recorder())
        made = [engine.submit(request(np.arange(2, 20 + i), 30, f"r{i}", sampling=SEEDED))[0] for i in range(12)]
        drain(engine)
        leader.shutdown()
        for end in ends:
            end.result(60)
        assert failures == [[], [], []]
    assert [s.generated for s in made] == [rollout(s.request, 0) for s in made]

    def ran(inner):
        """For how many drafts each step had room, none in a plain one, and what requests verified."""
        rooms = [int(p.speculation.max_drafts.max()) if p.speculation else p.decodes and 0 for p in inner.plans]
        found = [result.speculation for result in inner.results]
        return rooms, [part and [part.verified.tolist(), part.tokens.tolist()] for part in found]

    rooms, verified = ran(inners[0])
    assert {1, 4} <= {*rooms}
    assert ran(inners[1]) == ran(inners[2]) == (rooms, verified)


def test_costs_that_do_not_come_are_an_error():
    with connected(2) as (leader, (follower,), _):
        leader.broadcast(Kind.WAIT)
        with pytest.raises(ChannelFailure, match="process 0 sent WAIT before COSTS"):
            share_costs(follower, [])


class FailsOnce(CheckingExecutor):
    """Its call number `at` of one kind fails, in every process the same."""

    def __init__(self, cfg, where, at):
        super().__init__(cfg)
        self.where, self.left = where, at

    def dispatch(self, plan):
        self.count("dispatch")
        super().dispatch(plan)

    def wait(self):
        self.count("wait")
        return super().wait()

    def count(self, where):
        self.left -= self.where == where
        if self.left == 0 and self.where == where:
            raise RuntimeError("injected failure")


@pytest.mark.parametrize("where", ["dispatch", "wait"])
def test_a_step_that_fails_everywhere_is_survived_together(where):
    inners = [FailsOnce(CFG, where, 5) for _ in range(3)]
    with group(inners) as (executor, _, _):
        engine = Engine(Scheduler(CFG), executor, Recorder())
        made = [engine.submit(request(np.arange(2, 20 + i), 8, f"r{i}", sampling=SEEDED))[0] for i in range(4)]
        drain(engine)
        assert [s.generated for s in made] == [rollout(s.request, 0) for s in made]
    assert [inner.left < 0 for inner in inners] == [True] * 3
    assert [inner.resets for inner in inners] == [1, 1, 1]


def test_no_process_ends_within_a_step():
    inners = [RecordingExecutor(CheckingExecutor(CFG)) for _ in range(2)]
    with group(inners) as (executor, _, _):
        executor.dispatch(first_plan())
        executor.reset()
        executor.dispatch(first_plan())
        executor.finish()
    for inner in inners:
        assert [e.kind for e in inner.events] == ["dispatch", "reset", "dispatch", "wait"]


def test_a_failure_of_the_scheduler_resets_all():
    inners = [CheckingExecutor(CFG) for _ in range(2)]
    with group(inners) as (executor, _, _):
        executor.dispatch(plan := first_plan())
        executor.reset()
        executor.dispatch(plan)
        assert executor.wait().number == plan.number
    assert [inner.resets for inner in inners] == [1, 1]


def first_plan():
    scheduler = Scheduler(CFG)
    scheduler.submit(scheduler.prepare(request(np.arange(2, 20), 8, "r")), 0.0)
    return scheduler.schedule(0.0)[0]


@pytest.mark.parametrize("where", [1, 2], ids=["dispatch", "wait"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_step_that_fails_in_one_process_ends_all(where, culprit):
    inners = [CheckingExecutor(CFG) for _ in range(3)]
    with group(inners, strict=0, silence_seconds=4.0) as (executor, ends, failures):
        inners[culprit].fail_next = where
        with contextlib.suppress(ChannelFailure):  # the engine may have done its work before it hears of it
            engine = Engine(Scheduler(CFG), executor, Recorder())
            engine.submit(request(np.arange(2, 20), 8, "r"))
            drain(engine)
        for failure in failures:
            failure.wait()
        for end in ends:
            assert isinstance(end.exception(60), ChannelFailure)
    place = "dispatch" if where == 1 else "wait"
    if culprit:
        assert all(f"RuntimeError: injected failure in {place}" in f[0] for f in failures[:2])
    else:
        assert all("a step failed on process 0 only" in f[0] for f in failures)


def test_a_failure_elsewhere_ends_an_engine_that_has_nothing_to_do():
    inners = [CheckingExecutor(CFG) for _ in range(2)]
    with group(inners, strict=0, silence_seconds=4.0) as (executor, _, failures):
        inners[1].fail_next = 1
        executor.dispatch(first_plan())
        assert "a step failed on process 1 and not here: RuntimeError: injected" in failures[0].wait()
        failures[1].wait()


class Stuck(CheckingExecutor):
    """Its first step never ends."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.released = threading.Event()

    def wait(self):
        self.released.wait(60)
        return super().wait()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_step_that_hangs_ends_all_in_time(culprit):
    inners = [CheckingExecutor(CFG), CheckingExecutor(CFG)]
    inners[culprit] = Stuck(CFG)
    with group(inners, strict=culprit, call_seconds=0.5) as (executor, _, failures):
        executor.dispatch(first_plan())
        waiting = threading.Thread(target=lambda: contextlib.suppress(ChannelFailure).__enter__() or executor.wait())
        waiting.start()
        for failure in failures:
            assert "a step has not ended within 0.5 s" in failure.wait()
        inners[culprit].released.set()
        waiting.join(60)


FOLLOWER = [sys.executable, str(Path(__file__).with_name("following_process.py"))]


@contextlib.contextmanager
def processes(count, **options):
    """(executor of process 0, its channel, the others as processes, failures of process 0), with options of its own."""
    port, failures = free_port(), Failures()
    commands = [[*FOLLOWER, str(port), str(i), str(count), "{}"] for i in range(1, count)]
    others = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        leader = LeaderChannel(channel_config(0, count, port, **options), failures)
        executor = BroadcastExecutor(CheckingExecutor(CFG), leader)
        leader.meet()
        yield executor, leader, others, failures
    finally:
        for other in others:
            other.kill()
            other.communicate()


def test_processes_end_with_process_0():
    with processes(3) as (executor, leader, others, failures):
        engine = Engine(Scheduler(CFG), executor, Recorder())
        (sequence,) = engine.submit(request(np.arange(2, 30), 8, "r", sampling=SEEDED))
        drain(engine)
        assert sequence.generated == rollout(sequence.request, 0)
        leader.shutdown()
        for other in others:
            printed, errors = other.communicate(timeout=60)
            assert (other.returncode, printed) == (0, "connected\nshut down\n"), errors
    assert failures == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_ends_the_others_with_their_own_exit_code(number):
    with processes(3, silence_seconds=4.0) as (executor, _, others, failures):
        executor.dispatch(first_plan())
        os.kill(others[0].pid, number)
        why = "is gone: its connection was closed" if number == signal.SIGKILL else "gave no sign of life for 4 s"
        assert failures.wait() == f"process 0: process 1 {why}"
        with pytest.raises(ChannelFailure, match=why):
            executor.wait()
        _, errors = others[1].communicate(timeout=60)
        assert others[1].returncode == FAILURE_EXIT_CODE
        assert f"error: process 2: process 0 has ended: process 0: process 1 {why}; ending" in errors
        if number == signal.SIGSTOP:
            os.kill(others[0].pid, signal.SIGCONT)
            _, errors = others[0].communicate(timeout=60)
            assert others[0].returncode == FAILURE_EXIT_CODE and "error: process 1: process 0" in errors


LEADER = """
import sys
sys.path.insert(0, sys.argv[1])
from channels import channel_config
from dsv4jax.engine.channel import LeaderChannel, end_process
from dsv4jax.engine.connection import Kind
leader = LeaderChannel(channel_config(0, 3, int(sys.argv[2])), end_process)
leader.meet()
print("ready", flush=True)
leader.wait_for_all(Kind.RESET_DONE)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_process_0_all_others_end_in_time(number):
    port = free_port()
    commands = [[sys.executable, "-c", LEADER, str(Path(__file__).parent), str(port)]]
    commands += [[*FOLLOWER, str(port), str(i), "3", '{"silence_seconds": 4.0}'] for i in (1, 2)]
    leader, *others = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        assert leader.stdout.readline() == "ready\n"
        leader.send_signal(number)
        for i, other in enumerate(others, 1):
            _, errors = other.communicate(timeout=60)
            assert other.returncode == FAILURE_EXIT_CODE
            assert f"error: process {i}: process 0 " in errors and "Traceback" not in errors
        if number == signal.SIGSTOP:
            leader.send_signal(signal.SIGCONT)
            _, errors = leader.communicate(timeout=60)
            assert leader.returncode == FAILURE_EXIT_CODE and "error: process 0: process " in errors
    finally:
        for process in (leader, *others):
            process.kill()
            process.communicate()
