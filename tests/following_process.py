"""A process that carries out another's plans on a fake device, without JAX.

Called with the port, its number, how many there are and options of the channel in JSON. Prints a line once it is
connected and one once it was shut down.
"""

import json
import sys

from channels import TWO_RANKS, channel_config
from engine_model import CheckingExecutor

from dsv4jax.engine.broadcast import follow
from dsv4jax.engine.channel import FollowerChannel, end_process

if __name__ == "__main__":
    *numbers, options = sys.argv[1:]
    port, process, processes = map(int, numbers)
    channel = FollowerChannel(channel_config(process, processes, port, **json.loads(options)), end_process)
    print("connected", flush=True)
    channel.meet()
    follow(channel, CheckingExecutor(TWO_RANKS))
    print("shut down", flush=True)
    channel.close()
