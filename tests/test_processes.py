"""Several processes of a JAX cluster, with one CPU device each: the answers of one process, and no hang without one."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from channels import TOKEN, free_port
from test_serve import SERVE, call, caught_running

from dsv4jax.engine.channel import FAILURE_EXIT_CODE

# Half the time to compile; JAX 0.11 does not have it.
FAST_COMPILATION = "--xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
SECONDS = 250  # until a process counts as hanging; each compiles the model
FLAGS = [
    "--slots=2",
    "--pages=24",
    "--page_size=8",
    "--max_model_len=64",
    "--prefill_tokens=32",
    "--prefill_requests=2",
    "--deterministic",
    "--strict",
]
# Of several processes: experts of target and draft move all the time.
MOVING = ["--expert_slots=7", "--draft_expert_slots=7", "--balance_window=3", "--balance_interval=6"]


class Server:
    """All processes of a server, of which process 0 has begun to listen at `address`."""

    def __init__(self, checkpoint, processes):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {FAST_COMPILATION}",
            "DSV4JAX_CLUSTER_TOKEN": TOKEN,
        }
        command = [*SERVE, f"--model={checkpoint}", *FLAGS]
        if processes > 1:
            command += [f"--coordinator=127.0.0.1:{free_port()}", f"--processes={processes}", f"--ranks={processes}"]
            command += MOVING
        commands = [[*command, *([f"--process={i}"] if i else [])] for i in range(processes)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        self.processes = [subprocess.Popen(c, env=environment, **pipes) for c in commands]
        self.logs = [[] for _ in commands]
        self.address = None
        self._listens = threading.Event()
        self._readers = [threading.Thread(target=self._read, args=(i,)) for i in range(processes)]
        for reader in self._readers:
            reader.start()

    def ready(self):
        self._listens.wait(SECONDS)
        assert self.address, self.logs
        return self

    def ends(self):
        """Exit codes and what each process has logged."""
        codes = [process.wait(SECONDS) for process in self.processes]
        for reader in self._readers:
            reader.join()
        return codes, ["".join(log) for log in self.logs]

    def kill(self):
        for process in self.processes:
            process.kill()
        self.ends()

    def _read(self, i):
        for line in self.processes[i].stderr:
            self.logs[i].append(line)
            if i == 0 and (found := re.search(r"listening on ([\d.]+:\d+)", line)):
                self.address = f"http://{found[1]}"
                self._listens.set()
        self._listens.set()


@pytest.fixture
def start(two_layers):
    servers = []

    def one(processes):
        servers.append(Server(two_layers, processes))
        return servers[-1]

    yield one
    for server in servers:
        server.kill()


def complete(address, i, **fields):
    prompt = [2 + (7 * i + 3 * k * k) % 700 for k in range(3 + 6 * i)]
    body = {
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0.8,
        "seed": i,
        "logprobs": 1,
        "ignore_eos": True,
        **fields,
    }
    return json.loads(call(address, "/v1/completions", body))["choices"]


def answers(address):
    """More requests at once than all slots hold, one with masks that change; and one again, with a cached prefix."""
    masked = {"structured_outputs": {"regex": "[a-f ]{9}"}}
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda i: complete(address, i, **(masked if i == 3 else {})), range(6)))
    return [*found, complete(address, 5), complete(address, 4, echo=True, max_tokens=1)]


@pytest.mark.timeout(2 * SECONDS)
def test_two_processes_answer_like_one_and_drain_together(start):
    servers = [start(1), start(2)]
    alone, together = (answers(server.ready().address) for server in servers)
    assert together == alone
    metrics = ""

    def value(name, label=""):
        return float(re.search(rf"^{name}{{.*{label}.*}} (\S+)$", metrics, re.M)[1])

    while not metrics or value("dsv4jax:steps_total") < 110:  # how experts move is read every hundred steps
        complete(servers[1].address, 0, max_tokens=50)
        metrics = call(servers[1].address, "/metrics").decode()
    assert value("dsv4jax:compilations_total") == 0
    assert all(value("dsv4jax:verified_drafts_total", f'position="{place}"') > 0 for place in range(4))
    for model in ("expert", "draft_expert"):
        assert value(f"dsv4jax:{model}_rearrangements_total") > 0
        assert value(f"dsv4jax:{model}_rearrangement_failures_total") == 0
    with ThreadPoolExecutor(1) as pool:
        running = caught_running(
            servers[1].address, lambda: pool.submit(complete, servers[1].address, 0, max_tokens=50)
        )
        for process in servers[1].processes:
            process.send_signal(signal.SIGTERM)
        assert len(running.result(SECONDS)[0]["logprobs"]["tokens"]) == 50
    codes, logs = servers[1].ends()
    assert codes == [0, 0], logs
    assert "waiting for process 0 to drain" in logs[1]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("number", "why"),
    [(signal.SIGKILL, "is gone: its connection was closed"), (signal.SIGSTOP, "gave no sign of life")],
)
def test_a_process_lost_amid_collectives_ends_the_others(number, why):
    port, program = free_port(), str(Path(__file__).with_name("collective_process.py"))
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    commands = [[sys.executable, program, str(port), str(i), "3"] for i in range(3)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        while (line := processes[0].stdout.readline()) != "running\n":
            assert line, processes[0].stderr.read()[-4000:]
        processes[1].send_signal(number)
        for i in (0, 2):
            _, errors = processes[i].communicate(timeout=SECONDS)
            assert processes[i].returncode == FAILURE_EXIT_CODE, errors[-4000:]
            assert f"process 0: process 1 {why}" in errors and "; ending, all processes" in errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
