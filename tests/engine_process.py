"""One of the processes of an engine on a JAX cluster: a checkpoint, a port, its number and how many there are.

Process 0 prints the tokens and log-probabilities of `process_model.requests()`, then keeps the engine busy until a line
on its input ends it. A single process does the first only.
"""

import json
import sys
import threading
from pathlib import Path

import jax
from channels import channel_config
from process_model import make_engine, make_executor, requests

from dsv4jax.engine.broadcast import BroadcastExecutor, follow
from dsv4jax.engine.channel import ChannelFailure, end_process, open_channel
from dsv4jax.engine.cluster import join_cluster
from dsv4jax.engine.plan import Executor
from sharding import SINGLE, decode_dep


def run(checkpoint: Path, executor: Executor, ranks: int) -> None:
    engine = make_engine(checkpoint, executor, ranks)
    made = [engine.submit(request)[0] for request in requests()]
    while not engine.idle:
        engine.step()
    print("result", json.dumps([[s.generated, s.logprobs] for s in made]), flush=True)
    if ranks > 1:
        told = threading.Thread(target=sys.stdin.readline)
        told.start()
        while told.is_alive():
            if engine.idle:
                engine.submit(requests()[0])
            engine.step()


def main(checkpoint: Path, port: int, process: int, processes: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    if processes == 1:
        run(checkpoint, make_executor(checkpoint, SINGLE), 1)
        return
    config = channel_config(process, processes, port, start_seconds=60.0, silence_seconds=3.0)
    with open_channel(config, end_process) as channel:
        join_cluster(config)
        executor = make_executor(checkpoint, decode_dep(jax.device_count()))
        if process:
            follow(channel, executor)
            return
        leading = BroadcastExecutor(executor, channel)
        leading.wait_until_ready()
        run(checkpoint, leading, processes)
        leading.finish()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    except ChannelFailure as failure:
        end_process(failure)
