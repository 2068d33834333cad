"""What is trained when: the default model's configuration and its stages, short contexts first."""

import dataclasses
import json
import math
from pathlib import Path

from dsv4jax.checkpoint.reduced_config import with_fitted_tables
from dsv4jax.config import ModelConfig, RopeScaling, VisionConfig
from dsv4jax.tokenizer import Tokenizer, engram_token_map
from dsv4jax.training.data import Mixture
from dsv4jax.training.skills import SKILLS
from dsv4jax.training.step import Phase

_WARM_UP = 0.03
"""Share of the steps in which the rate grows to its peak."""
_LAST_RATE = 0.05
_LONG_SKILLS = ("tool_call",)
"""Skills whose prompts do not fit into short rows."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stretch of training at one shape.

    Raises:
      ValueError: a number that must be positive is not.
    """

    phase: Phase
    length: int
    """Tokens per row."""
    batch: int
    share: float
    """Of the time, where `steps` are to be found by measuring."""
    steps: int | None = None
    """None: as many as fit into the stage's share of the time."""
    mixture: Mixture = dataclasses.field(default_factory=Mixture)

    def __post_init__(self):
        for name in ("length", "batch", "share"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps = {self.steps}: must be positive, or None")


Plan = tuple[Stage, ...]
_SHORT = Mixture(skills=tuple(s for s in SKILLS if s not in _LONG_SKILLS))
DEFAULT_PLAN: Plan = (
    # Most is learnt where it is cheapest. Attention sees all of a row, so that the indexer has something to learn from.
    Stage("dense", 256, 256, share=0.40, mixture=_SHORT),
    Stage("sparse", 1024, 64, share=0.25),
    Stage("sparse", 2048, 32, share=0.20),
    Stage("draft", 1024, 64, share=0.15),
)


def learning_rate(plan: Plan, stage: int, step: int) -> float:
    """Factor on the peak rate: a warm-up, then half a cosine over the stages of the model and one over the draft's.

    Args:
      plan: the steps of its stages up to this one are known.
      step: within the stage.
    """
    phase = plan[stage].phase == "draft"
    together = [i for i, s in enumerate(plan) if (s.phase == "draft") == phase]
    before = sum(plan[i].share for i in together if i < stage)
    done = before + plan[stage].share * step / plan[stage].steps
    progress = min(1.0, done / sum(plan[i].share for i in together))
    cosine = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2
    return min(1.0, progress / _WARM_UP) * cosine


def write_plan(path: Path, plan: Plan) -> None:
    """Writes a plan as JSON, which `read_plan` reads."""
    path.write_text(json.dumps([dataclasses.asdict(stage) for stage in plan], indent=1) + "\n", encoding="utf-8")


def read_plan(path: Path) -> Plan:
    """The plan of a file.

    Raises:
      ValueError: not such a file; names it.
    """
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))
        return tuple(
            Stage(**stage | {"mixture": Mixture(tuple(stage["mixture"]["skills"]), stage["mixture"]["text_share"])})
            for stage in stages
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a plan of training: {error!r}") from error


def default_config(tokenizer: Tokenizer) -> ModelConfig:
    """The trained default model: ten layers of every kind; windows, selections and candidates far shorter than the
    contexts it is trained on."""
    cfg = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=192,
        num_hidden_layers=10,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=128,
        o_lora_rank=64,
        o_groups=2,
        max_position_embeddings=16384,
        rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=4096),
        moe_intermediate_size=96,
        n_routed_experts=16,
        num_experts_per_tok=3,
        sliding_window=32,
        compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(2, 4, 6),
        index_source_layer_ids=(2, 4, 6, 8),
        index_n_heads=8,
        index_head_dim=32,
        index_topk=32,
        candidate_source_layer_id=6,
        candidate_topk_blocks=16,
        engram_layer_ids=(1, 4),
        engram_num_embeddings=(1 << 24, 1 << 24),
        engram_n_heads=2,
        engram_head_dim=32,
        engram_vocab_size=4000,
        engram_compressed_vocab_size=int(engram_token_map(tokenizer).max()) + 1,
        dspark_noise_token_id=tokenizer.control_id("<｜System｜>"),
        dspark_target_layer_ids=(7, 8, 9),
        dspark_markov_rank=64,
        dspark_n_routed_experts=8,
        dspark_num_experts_per_tok=2,
        pad_token_id=tokenizer.pad_id,
        image_token_id=tokenizer.control_id("<｜deepseek_image｜>"),
        vision=VisionConfig(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, patch_size=14,
            max_image_tokens=64, min_pixels=3136,
        ),
    )  # fmt: skip
    return with_fitted_tables(cfg)
