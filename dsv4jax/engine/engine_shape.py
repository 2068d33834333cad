"""What the programs of an engine are compiled for, besides the model: to compile them, or to know what was compiled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from dsv4jax.batch import DecodeBucket, PrefillBucket
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engine.programs import Buckets, DraftBucket, make_buckets
from dsv4jax.engine.replay import Replay, ReplayRule
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.numerics import Numerics
from sharding import Layout, preset


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Sizes of an engine, and how it computes; those of cache and buckets are of one rank.

    Args:
      preset, devices: of the layout, see `sharding.preset`.
      expert_slots, draft_expert_slots: of each rank, for the experts of a backbone layer and of a draft stage; None for
        experts that stay where they are.
      max_model_len: most tokens of prompt and output together.
      replay: of window keys after a prefix hit, and of prompts in the decoder half.
      deterministic: one shape per kind of step.
      drafts: most drafts that a request verifies in a step.
      tables_on_device: False for Engram tables on the host.
    """

    cache: CacheConfig
    buckets: Buckets
    numerics: Numerics
    max_model_len: int
    preset: str = "single"
    devices: int = 1
    expert_slots: int | None = None
    draft_expert_slots: int | None = None
    replay: Replay = "exact"
    deterministic: bool = False
    drafts: int = 0
    tables_on_device: bool = True

    @property
    def layout(self) -> Layout:
        """The layout over the first devices of this process.

        Raises:
          ValueError: there are fewer devices.
        """
        return preset(self.preset, self.devices)

    @property
    def slots_of_experts(self) -> dict[str, int | None]:
        """`expert_slots` and `draft_expert_slots` as keywords."""
        return {"expert_slots": self.expert_slots, "draft_expert_slots": self.draft_expert_slots}

    def to_dict(self) -> dict[str, Any]:
        """The shape as JSON has it; `from_dict` reads it back unchanged."""
        fields = dataclasses.asdict(self)
        fields["numerics"]["dtype"] = jnp.dtype(self.numerics.dtype).name
        fields["buckets"] = {name: list(buckets) for name, buckets in fields["buckets"].items()}
        return fields

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EngineShape":
        """Inverse of `to_dict`.

        Raises:
          TypeError, ValueError: a field is missing, unknown or out of range.
        """
        numerics = Numerics(**{**data["numerics"], "dtype": getattr(jnp, data["numerics"]["dtype"])})
        types = {"prefill": PrefillBucket, "decode": DecodeBucket, "verify": DecodeBucket, "draft": DraftBucket}
        buckets = Buckets(
            masks=tuple(data["buckets"]["masks"]),
            **{name: tuple(kind(**bucket) for bucket in data["buckets"][name]) for name, kind in types.items()},
        )
        return cls(**{**data, "cache": CacheConfig(**data["cache"]), "buckets": buckets, "numerics": numerics})


def shape_buckets(
    cache_cfg: CacheConfig,
    *,
    prefill_tokens: list[int],
    prefill_requests: int,
    decode_requests: list[int],
    contexts: list[int],
    replay: Replay,
    deterministic: bool,
    drafts: int,
    fewer_drafts: Sequence[int] = (),
) -> Buckets:
    """The buckets of an engine: all combinations of sizes, in deterministic mode of the largest ones only."""
    if deterministic:
        contexts, prefill_tokens, decode_requests = contexts[-1:], prefill_tokens[-1:], decode_requests[-1:]
        fewer_drafts = ()
    buckets = make_buckets(
        cache_cfg,
        prefill_tokens=prefill_tokens,
        prefill_requests=prefill_requests,
        decode_requests=decode_requests,
        contexts=contexts,
        bounded=replay == "bounded",
        drafts=drafts,
        fewer_drafts=fewer_drafts,
    )
    # Every step of a deterministic engine runs with drafts, if any does.
    return dataclasses.replace(buckets, decode=()) if deterministic and drafts else buckets


def scheduler_config(cfg: ModelConfig, shape: EngineShape, eos_id: int, **policy: Any) -> SchedulerConfig:
    """The scheduler's configuration for an engine of this shape; `policy` are the fields that no program depends on.

    Raises: as `SchedulerConfig`.
    """
    prefill = shape.buckets.prefill
    return SchedulerConfig(
        slots=shape.cache.slots,
        pages=shape.cache.pages,
        page_size=shape.cache.page_size,
        max_model_len=shape.max_model_len,
        eos_id=eos_id,
        replay=ReplayRule(cfg.sliding_window, cfg.num_hidden_layers, shape.replay),
        ranks=shape.layout.ranks,
        prefill_tokens=max(bucket.tokens for bucket in prefill),
        prefill_requests=max(bucket.requests for bucket in prefill),
        tile=prefill[0].tile,
        deterministic=shape.deterministic,
        drafts=shape.drafts,
        tokens_on_host=not shape.tables_on_device,
        **policy,
    )
