"""Several processes on a JAX cluster, with one CPU device each: the tokens of one process, and no hang without one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from channels import free_port
from process_model import write_small_checkpoint

from dsv4jax.engine.channel import FAILURE_EXIT_CODE

PROCESS = str(Path(__file__).with_name("engine_process.py"))
SECONDS = 240  # until a process counts as hanging; each compiles the model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    write_small_checkpoint(path)
    return path


@pytest.fixture
def start(checkpoint):
    """Starts all processes of an engine; whatever is left of them in the end is killed."""
    started = []

    def all_of(processes):
        root, port = Path(__file__).parent, free_port()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(root.parent), str(root)]),
            "JAX_PLATFORMS": "cpu",
            # Half the time to compile.
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_cpu_use_fusion_emitters=false",
            # What the first engine of so many processes has compiled the second reads.
            "JAX_COMPILATION_CACHE_DIR": str(checkpoint.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        for number in range(processes):
            command = [sys.executable, PROCESS, str(checkpoint), str(port), str(number), str(processes)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        return started[-processes:]

    yield all_of
    for process in started:
        process.kill()
        process.communicate()


def result(process):
    """What process 0 has printed for its requests."""
    for line in process.stdout:
        if line.startswith("result "):
            return json.loads(line.removeprefix("result "))
    raise AssertionError(process.stderr.read()[-4000:])


@pytest.mark.timeout(2 * SECONDS)
def test_several_processes_give_the_tokens_of_one_and_end_together(start):
    (alone,) = start(1)
    processes = start(2)
    assert result(processes[0]) == result(alone)
    for process in processes:
        _, errors = process.communicate("end\n" if process is processes[0] else "", SECONDS)
        assert process.returncode == 0, errors[-4000:]


@pytest.mark.timeout(2 * SECONDS)
def test_a_process_killed_in_the_middle_of_a_step_ends_the_others(start):
    leader, follower = start(2)
    result(leader)
    os.kill(follower.pid, signal.SIGKILL)
    code, errors = leader.wait(SECONDS), leader.stderr.read()
    assert code == FAILURE_EXIT_CODE, errors[-4000:]
    assert "error: process 0: process 1 is gone: its connection was closed; ending" in errors
