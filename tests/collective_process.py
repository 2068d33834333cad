"""A process of an engine whose steps are nothing but a collective of JAX: its port, number, and how many there are."""

import collections
import sys

import jax
import jax.numpy as jnp
from channels import channel_config

from dsv4jax.engine.broadcast import BroadcastExecutor, follow
from dsv4jax.engine.channel import ChannelFailure, end_process, open_channel
from dsv4jax.engine.cluster import join_cluster
from dsv4jax.engine.plan import StepPlan, StepResult


class Collective:
    """Sums a number over all devices."""

    def __init__(self):
        mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(jax.sharding.AxisType.Explicit,))
        spread, everywhere = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("all",), ()))
        ones = jnp.ones(jax.local_device_count())
        self._ones = jax.make_array_from_process_local_data(spread, jax.device_get(ones))
        self._sum = jax.jit(jnp.sum, out_shardings=everywhere)
        self._queue = collections.deque()

    def dispatch(self, plan):
        self._queue.append((plan.number, self._sum(self._ones)))

    def wait(self):
        number, total = self._queue.popleft()
        assert float(total) == jax.device_count()
        return StepResult(number, (), 0.0)

    def reset(self):
        self._queue.clear()


def main(port: int, process: int, processes: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    # Process 0 alone judges who is silent.
    silence_seconds = 60.0 if process else 4.0
    config = channel_config(process, processes, port, silence_seconds=silence_seconds, start_seconds=200.0)
    with open_channel(config, end_process) as channel:
        join_cluster(config)
        channel.meet()
        if process:
            follow(channel, Collective())
            return
        executor = BroadcastExecutor(Collective(), channel)
        for number in range(10**9):
            try:
                executor.dispatch(StepPlan(number, ()))
                executor.wait()
            except Exception:  # a lost process may show here first; then `reset` raises, as in an engine
                executor.reset()
            if number == 10:
                print("running", flush=True)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except ChannelFailure as failure:
        end_process(failure)
