"""Converts a safetensors checkpoint to an Orbax snapshot, or a snapshot back to a checkpoint.

python scripts/convert.py --input checkpoint --output snapshot
python scripts/convert.py --input snapshot --output checkpoint --to checkpoint
"""

import command_line
from absl import flags, logging

from dsv4jax.checkpoint.snapshot import checkpoint_to_snapshot, snapshot_to_checkpoint

_INPUT = flags.DEFINE_string("input", None, "Directory to read.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write; must not exist.", required=True)
_TO = flags.DEFINE_enum("to", "snapshot", ["snapshot", "checkpoint"], "What to write.")
_SHARD_BYTES = flags.DEFINE_integer("shard_bytes", 5 << 30, "Most tensor bytes in one safetensors file.", lower_bound=1)


def main() -> None:
    logging.set_verbosity(logging.WARNING)  # Orbax lists every array at INFO
    if _TO.value == "snapshot":
        checkpoint_to_snapshot(_INPUT.value, _OUTPUT.value)
    else:
        snapshot_to_checkpoint(_INPUT.value, _OUTPUT.value, shard_bytes=_SHARD_BYTES.value)


if __name__ == "__main__":
    command_line.run(main)
