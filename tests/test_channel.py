"""The connections between processes: who is let in, what arrives, and that nobody waits for the dead."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from channels import TOKEN, Failures, channel_config, connected, free_port
from waiting import eventually

from dsv4jax.engine import channel as channel_module
from dsv4jax.engine.channel import ChannelFailure, FollowerChannel, LeaderChannel
from dsv4jax.engine.connection import Connection, Kind
from dsv4jax.engine.handshake import HandshakeError, Mismatch


def start_both(leader, follower):
    """What making the two ends gave: channels or exceptions."""
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(LeaderChannel, leader, Failures()), pool.submit(FollowerChannel, follower, Failures())]
        outcomes = [future.exception(60) or future.result() for future in made]
    for outcome in outcomes:
        if not isinstance(outcome, Exception):
            outcome.close()
    return outcomes


def test_commands_arrive_whole_and_in_order_at_all_processes():
    with connected(3) as (leader, followers, failures):
        bodies = [bytes([i]) * (i * 40_000) for i in range(20)]
        got = [[], []]

        def read(i):
            while (command := followers[i].receive())[0] is not Kind.SHUTDOWN:
                got[i].append(command)

        readers = [threading.Thread(target=read, args=(i,)) for i in range(2)]
        for reader in readers:
            reader.start()
        for body in bodies:
            leader.broadcast(Kind.DISPATCH, body)
            leader.broadcast(Kind.WAIT)
        stopping = threading.Thread(target=leader.shutdown)
        stopping.start()
        for reader, follower in zip(readers, followers, strict=True):
            reader.join(60)
            follower.close()
        stopping.join(60)
        expected = [command for body in bodies for command in ((Kind.DISPATCH, body), (Kind.WAIT, b""))]
        assert got == [expected, expected]
        assert failures == [[], [], []]


def test_answers_are_awaited_from_all():
    with connected(3) as (leader, followers, _):
        waiting = threading.Thread(target=leader.wait_for_all, args=(Kind.READY,))
        waiting.start()
        followers[1].send(Kind.READY)
        waiting.join(0.3)
        assert waiting.is_alive()
        followers[0].send(Kind.READY)
        waiting.join(60)
        assert not waiting.is_alive()


def test_processes_meet():
    with connected(3) as (leader, followers, _), ThreadPoolExecutor(3) as pool:
        met = [pool.submit(channel.meet) for channel in (leader, followers[0])]
        time.sleep(0.2)
        assert not any(one.done() for one in met)
        followers[1].meet()
        for one in met:
            one.result(60)
        leader.broadcast(Kind.WAIT)
        assert [follower.receive() for follower in followers] == [(Kind.WAIT, b"")] * 2


def test_idle_processes_stay_connected():
    with connected(2, silence_seconds=4.0) as (leader, (follower,), failures):
        time.sleep(5.0)
        leader.broadcast(Kind.WAIT)
        assert follower.receive() == (Kind.WAIT, b"")
        assert failures == [[], []]


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"model": "b", "programs": "p"}, "model: process 1 has 'b', process 0 has 'a'"),
        ({"model": "a", "programs": "q"}, "programs: process 1 has 'q', process 0 has 'p'"),
        ({"model": "a"}, "programs: process 1 has None, process 0 has 'p'"),
        ({"model": "a", "programs": "p", "layout": "x"}, "layout: process 1 has 'x', process 0 has None"),
    ],
)
def test_what_differs_between_processes_is_named_on_both_sides(identity, message):
    port = free_port()
    leader = channel_config(port=port, identity={"model": "a", "programs": "p"})
    for outcome in start_both(leader, channel_config(1, port=port, identity=identity)):
        assert isinstance(outcome, Mismatch) and str(outcome) == message


def test_a_process_number_is_taken_once():
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        leading = pool.submit(LeaderChannel, channel_config(processes=3, port=port), Failures())
        config, lost = channel_config(2, 3, port), Failures()
        first = FollowerChannel(config, lost)
        with pytest.raises(Mismatch, match="process = 2: is connected already"):
            FollowerChannel(config, Failures())
        assert isinstance(leading.exception(60), Mismatch)
        # The process that was right hears of it too.
        assert "process 0 has ended: process 0: process = 2: is connected already" in lost.wait()
        first.close()


def test_another_token_is_refused_without_disturbing_the_others():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(LeaderChannel, channel_config(port=port), Failures())
        with pytest.raises(HandshakeError, match="not signed with this token"):
            FollowerChannel(channel_config(1, port=port, token=TOKEN[::-1]), Failures())
        follower = FollowerChannel(channel_config(1, port=port), Failures())
        leader = leading.result(60)
        leader.broadcast(Kind.WAIT)
        assert follower.receive() == (Kind.WAIT, b"")
        leader.close()
        follower.close()


@pytest.mark.parametrize("content", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000])
def test_strangers_are_turned_away(content):
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(LeaderChannel, channel_config(port=port), Failures())
        with connect(port) as stranger:
            stranger.settimeout(60)
            with contextlib.suppress(OSError):  # it may be turned away at any of these
                stranger.sendall(content)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(65536):
                    pass
        follower = FollowerChannel(channel_config(1, port=port), Failures())
        leading.result(60).close()
        follower.close()


def connect(port):
    """A connection as soon as somebody listens."""
    for _ in range(1000):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
        time.sleep(0.05)
    raise AssertionError("nobody listens")


def test_something_else_at_the_address_is_recognised():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(FollowerChannel, channel_config(1, port=port), Failures())
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                with pytest.raises(HandshakeError, match=r"greeted with b'HTTP/1\.1'"):
                    following.result(60)


def test_who_does_not_come_is_named():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(LeaderChannel, channel_config(0, 4, port, start_seconds=4.0), Failures())
        lost = Failures()
        follower = FollowerChannel(channel_config(2, 4, port), lost)
        with pytest.raises(TimeoutError, match=r"processes \[1, 3\] did not connect within 4 s"):
            leading.result(60)
        assert r"processes [1, 3] did not connect" in lost.wait()
        follower.close()
    with pytest.raises(TimeoutError, match=f"no process 0 at 127.0.0.1:{port} within 0.3 s"):
        FollowerChannel(channel_config(1, port=port, start_seconds=0.3), Failures())


def test_an_address_that_cannot_be_listened_on_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: "):
            LeaderChannel(channel_config(port=port), Failures())


def test_a_process_that_says_why_it_ends_is_quoted_everywhere():
    with connected(3) as (leader, followers, failures):
        followers[0].close("not enough memory")
        assert failures[0].wait() == "process 0: process 1 has ended: not enough memory"
        assert failures[2].wait() == f"process 2: process 0 has ended: {failures[0][0]}"
        with pytest.raises(ChannelFailure, match="not enough memory"):
            leader.broadcast(Kind.WAIT)
        with pytest.raises(ChannelFailure, match="not enough memory"):
            leader.wait_for_all(Kind.READY)
        with pytest.raises(ChannelFailure, match="not enough memory"):
            followers[1].receive()


@pytest.mark.parametrize("sender", ["leader", "follower"])
def test_what_the_other_said_before_it_closed_is_told_by_a_thread_that_sends(sender, monkeypatch):
    read = Connection.read

    def read_late(connection):
        frame = read(connection)
        if frame[0] is Kind.END:
            time.sleep(0.3)  # meanwhile sending finds the connection closed
        return frame

    monkeypatch.setattr(Connection, "read", read_late)
    with connected() as (leader, (follower,), failures):
        ends = (leader, follower) if sender == "leader" else (follower, leader)
        ends[1].close("out of memory")
        send = leader.broadcast if sender == "leader" else follower.send
        with pytest.raises(ChannelFailure, match="out of memory"):
            while True:
                send(Kind.WAIT if sender == "leader" else Kind.RESET_DONE)
                time.sleep(0.001)
        assert "out of memory" in failures[ends[0].config.process].wait()


def test_a_lost_process_is_the_reason_and_not_the_step_that_it_made_fail_elsewhere(monkeypatch):
    monkeypatch.setattr(channel_module, "_LAST_WORDS_SECONDS", 60.0)
    with connected(3) as (leader, followers, failures):
        followers[1].send(Kind.STEP_FAILED, b"connection reset by peer")
        eventually(lambda: leader._step_failed)
        threading.Timer(0.3, followers[0].close).start()
        with pytest.raises(ChannelFailure, match="process 1 is gone: its connection was closed"):
            leader.broadcast(Kind.WAIT)
        assert "process 1 is gone" in failures[2].wait()


def test_that_process_0_has_ended_is_the_reason_and_not_the_step_that_failed_by_it(monkeypatch):
    monkeypatch.setattr(channel_module, "_LAST_WORDS_SECONDS", 60.0)
    with connected() as (leader, (follower,), _):
        threading.Timer(0.3, leader.close, args=("out of memory",)).start()
        assert "process 0 has ended: out of memory" in str(follower.fail_unless_lost("a step failed here only"))


def test_a_closed_connection_is_noticed_at_once_by_whoever_waits():
    with connected(2, heartbeat_seconds=20.0) as (leader, (follower,), failures):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(leader.wait_for_all, Kind.READY)
            follower.close()
            with pytest.raises(ChannelFailure, match="process 1 is gone: its connection was closed"):
                waiting.result(60)
        assert failures[0].wait()
    with connected(2, heartbeat_seconds=20.0) as (leader, (follower,), failures):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(follower.receive)
            leader.close()
            with pytest.raises(ChannelFailure, match="process 0 is gone: its connection was closed"):
                waiting.result(60)


def silence(channel):
    """Stops all that the channel sends and takes, as SIGSTOP does."""
    for connection in channel._connections.values():
        connection._lock.acquire()


def test_who_comes_upon_a_failure_waits_until_it_was_told():
    """Else an exception of this thread could end the process before `on_failure` does."""
    with connected(2) as (leader, *_):
        order, begun = [], threading.Event()

        def slow(failure):
            begun.set()
            time.sleep(0.3)
            order.append("told")

        leader._on_failure = slow
        thread = threading.Thread(target=leader.fail, args=("first",))
        thread.start()
        assert begun.wait(60)
        with pytest.raises(ChannelFailure, match="process 0: first"):
            leader.broadcast(Kind.WAIT)
        order.append("raised")
        thread.join(60)
        assert order == ["told", "raised"]


def test_silence_is_noticed():
    with connected(2, strict=0, silence_seconds=1.0) as (leader, (follower,), failures):
        silence(follower)
        assert failures[0].wait() == "process 0: process 1 gave no sign of life for 1 s"
    with connected(2, strict=1, silence_seconds=1.0) as (leader, (follower,), failures):
        silence(leader)
        assert failures[1].wait() == "process 1: process 0 gave no sign of life for 1 s"


def test_what_hangs_under_watch_ends_everything():
    with connected(2, call_seconds=0.5) as (leader, (follower,), failures):
        with leader.watch("quick"):
            pass
        time.sleep(0.8)
        assert failures == [[], []]
        with leader.watch("step 3"):
            assert failures[0].wait() == "process 0: step 3 has not ended within 0.5 s"
        assert "step 3 has not ended" in failures[1].wait()
    with connected(2) as (leader, (follower,), failures):
        with follower.watch("step 3", 0.5):
            assert "process 1: step 3 has not ended within 0.5 s" in failures[0].wait()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": "short"}, "token: must hold at least 16 characters, has 5"),
        ({"processes": 1}, "processes = 1: must be at least 2"),
        ({"process": 2}, "process = 2: must be from 0 to 1"),
        ({"process": -1}, "process = -1: must be from 0 to 1"),
        ({"heartbeat_seconds": 0}, "heartbeat_seconds = 0: must be above 0"),
        ({"call_seconds": -1}, "call_seconds = -1: must be above 0"),
        ({"silence_seconds": 0.2}, "silence_seconds = 0.2: must be at least 3 heartbeats of 0.1 s"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        channel_config(**options)


def test_the_token_is_not_printed():
    assert TOKEN not in repr(channel_config())
