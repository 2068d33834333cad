"""A process that carries out another's plans on a fake device, without JAX.

Called with the port, its number and how many there are. Prints a line once it is connected and one once it was shut
down.
"""

import sys

from channels import TWO_RANKS, channel_config
from engine_model import CheckingExecutor

from dsv4jax.engine.broadcast import follow
from dsv4jax.engine.channel import FollowerChannel, end_process

if __name__ == "__main__":
    port, process, processes = map(int, sys.argv[1:])
    channel = FollowerChannel(channel_config(process, processes, port, start_seconds=60.0), end_process)
    print("connected", flush=True)
    channel.meet()
    follow(channel, CheckingExecutor(TWO_RANKS))
    print("shut down", flush=True)
    channel.close()
