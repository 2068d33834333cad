"""Writes the embedded default model: a small checkpoint of random weights with every mechanism switched on.

    python scripts/make_tokenizer.py && python scripts/make_default_model.py

The tokenizer in the output directory must exist already. The result is the same on every machine.
"""

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path

import command_line
from absl import flags

from dsv4jax.checkpoint.random import random_tensor
from dsv4jax.checkpoint.reduced_config import with_fitted_tables
from dsv4jax.checkpoint.safetensors import write_checkpoint
from dsv4jax.config import ModelConfig, RopeScaling, VisionConfig
from dsv4jax.params import checkpoint_inventory
from dsv4jax.tokenizer import Tokenizer, engram_token_map

_OUTPUT = flags.DEFINE_string(
    "output", str(Path(__file__).parent.parent / "dsv4jax" / "default_model"), "Directory with the tokenizer.json."
)
_SEED = flags.DEFINE_integer("seed", 0, "Decides all weights.", lower_bound=0)


def default_config(tokenizer: Tokenizer) -> ModelConfig:
    """Ten layers of every kind, windows and selections far shorter than the context."""
    cfg = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        num_hidden_layers=10,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=2,
        max_position_embeddings=16384,
        rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=4096),
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=3,
        sliding_window=32,
        compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(2, 4, 6),
        index_source_layer_ids=(2, 4, 6, 8),
        index_n_heads=16,
        index_head_dim=32,
        index_topk=32,
        candidate_source_layer_id=6,
        candidate_topk_blocks=16,
        engram_layer_ids=(1, 4),
        engram_num_embeddings=(1 << 24, 1 << 24),
        engram_n_heads=2,
        engram_head_dim=32,
        engram_vocab_size=1000,
        engram_compressed_vocab_size=int(engram_token_map(tokenizer).max()) + 1,
        dspark_noise_token_id=tokenizer.control_id("<｜System｜>"),
        dspark_target_layer_ids=(7, 8, 9),
        dspark_markov_rank=32,
        dspark_n_routed_experts=8,
        dspark_num_experts_per_tok=2,
        image_token_id=tokenizer.control_id("<｜deepseek_image｜>"),
        vision=VisionConfig(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, patch_size=14,
            max_image_tokens=64, min_pixels=3136,
        ),
    )  # fmt: skip
    return with_fitted_tables(dataclasses.replace(cfg, pad_token_id=tokenizer.pad_id))


def main() -> None:
    output = Path(_OUTPUT.value)
    cfg = default_config(Tokenizer.from_checkpoint(output))
    plan = checkpoint_inventory(cfg)
    with tempfile.TemporaryDirectory() as scratch:
        new = Path(scratch) / "model"
        config = {"config.json": (json.dumps(cfg.to_dict(), indent=1) + "\n").encode()}
        tensors = ((name, random_tensor(name, cfg, _SEED.value)) for name in plan)
        write_checkpoint(new, plan, tensors, shard_bytes=1 << 30, files=config)
        for file in new.iterdir():
            shutil.copyfile(file, output / file.name)


if __name__ == "__main__":
    command_line.run(main)
