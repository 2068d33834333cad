"""Writes a checkpoint of random weights in the released layout.

    python scripts/make_checkpoint.py --layers 8 --engram_vocab_size 1000 --tokenizer tokenizer.json --output random8

Memory stays at one tensor. The size of Engram's compressed vocabulary is that of the tokenizer.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import command_line
import numpy as np
from absl import flags
from tqdm import tqdm

from dsv4jax.checkpoint.load import compressed_ids
from dsv4jax.checkpoint.random import random_tensor
from dsv4jax.checkpoint.reduced_config import reduced_config, with_fitted_tables
from dsv4jax.checkpoint.safetensors import write_checkpoint
from dsv4jax.config import ModelConfig
from dsv4jax.params import checkpoint_inventory
from dsv4jax.tokenizer import Tokenizer, engram_token_map

_RELEASED = "released"

_CONFIG = flags.DEFINE_string("config", _RELEASED, "Directory with a config.json, such a file, or 'released'.")
_LAYERS = flags.DEFINE_integer("layers", None, "Reduce the released configuration to so many layers.")
_ENGRAM = flags.DEFINE_integer("engram_vocab_size", None, "Shrink the Engram tables: where their prime search starts.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "tokenizer.json to go with the weights.", required=True)
_SHARD_BYTES = flags.DEFINE_integer("shard_bytes", 5 << 30, "Most tensor bytes in one file.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Decides all weights.", lower_bound=0)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write; must not exist.", required=True)


def configuration(config: str, layers: int | None, engram_vocab_size: int | None, tokenizer: Tokenizer) -> ModelConfig:
    """The configuration that the flags ask for.

    Raises:
      ValueError: flags that contradict each other, or a tokenizer that does not fit.
    """
    if config == _RELEASED:
        cfg = ModelConfig() if layers is None else reduced_config(layers)
    elif layers is not None:
        raise ValueError(f"--layers = {layers} reduces the released configuration only, not --config = {config!r}")
    else:
        path = Path(config)
        cfg = ModelConfig.from_checkpoint(path.parent if path.name == "config.json" else path)
    if engram_vocab_size is not None:
        cfg = with_fitted_tables(dataclasses.replace(cfg, engram_vocab_size=engram_vocab_size))
    for name in ("bos", "eos", "pad"):
        given, expected = getattr(tokenizer, f"{name}_id"), getattr(cfg, f"{name}_token_id")
        if given != expected:
            raise ValueError(f"{tokenizer.source}: {name} is id {given}, but {name}_token_id is {expected}")
    cfg = dataclasses.replace(cfg, engram_compressed_vocab_size=int(engram_token_map(tokenizer).max()) + 1)
    compressed_ids(tokenizer, cfg)
    return cfg


def main() -> None:
    tokenizer = Path(_TOKENIZER.value)
    cfg = configuration(_CONFIG.value, _LAYERS.value, _ENGRAM.value, Tokenizer.from_file(tokenizer))
    plan = checkpoint_inventory(cfg)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        total = sum(info.nbytes for info in plan.values())
        with tqdm(total=total, unit="B", unit_scale=True, desc="writing") as bar:
            for name, info in plan.items():
                yield name, random_tensor(name, cfg, _SEED.value)
                bar.update(info.nbytes)

    files = {
        "config.json": json.dumps(cfg.to_dict(), indent=1).encode(),
        "tokenizer.json": tokenizer.read_bytes(),
    }
    write_checkpoint(_OUTPUT.value, plan, tensors(), shard_bytes=_SHARD_BYTES.value, files=files)


if __name__ == "__main__":
    command_line.run(main)
