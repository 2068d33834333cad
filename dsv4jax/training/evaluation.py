"""What a checkpoint can do in every way it may be served: held-out replies, text, drafts and routing."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from dsv4jax.batch import (
    DecodeBucket,
    PrefillBucket,
    PrefillChunk,
    SpeculativeRequest,
    prefill_batch,
    speculative_batch,
)
from dsv4jax.cache import Cache, CacheConfig, init_cache
from dsv4jax.config import ModelConfig
from dsv4jax.draft_statistics import DraftStatistics, step_statistics, zero_statistics
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.programs import Programs, make_buckets
from dsv4jax.engine.records import Observer
from dsv4jax.engine.replay import Replay, ReplayRule
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.sequence import Sequence as Choice
from dsv4jax.numerics import FAST, REFERENCE, Numerics
from dsv4jax.params import Params
from dsv4jax.quant import ceil_div
from dsv4jax.sampling import request_rows
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.speculation import draft_step, speculative_step
from dsv4jax.steps import forward, prefill_step, start_request
from dsv4jax.tokenizer import Tokenizer
from dsv4jax.training.skills import Example

_GREEDY = RequestSampling(temperature=0.0)
_PREFILL = 1024


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to serve a model.

    Args:
      replay: of prefill's decoder half, and after prefix hits.
      hits: the whole pages of each prompt are in the prefix cache.
      drafts: whether the draft stages run.
    """

    numerics: Numerics = REFERENCE
    replay: Replay = "exact"
    hits: bool = False
    drafts: bool = False


MODES: Mapping[str, Mode] = {
    "no rounding of activations and caches": Mode(Numerics(quantize_activations=False, quantize_cache=False)),
    "reference": Mode(),
    "fast": Mode(FAST),
    "bounded replay": Mode(replay="bounded"),
    "prefix hits, exact replay": Mode(hits=True),
    "prefix hits, bounded replay": Mode(replay="bounded", hits=True),
    "speculation": Mode(drafts=True),
}


@dataclasses.dataclass(frozen=True)
class Answers:
    """Of some examples in one mode."""

    right: float
    """Share whose reply is, token for token, the one wanted."""
    acceptance_length: float | None
    """Mean tokens per verification; None without drafts."""


class _Silent(Observer):
    """Takes nothing."""


class Examiner:
    """Answers examples with greedy decoding through an engine in one mode."""

    def __init__(
        self, params: Params, cfg: ModelConfig, tokenizer: Tokenizer, mode: Mode, context: int, slots: int = 16
    ):
        """Compiles the engine's programs.

        Args:
          context: most tokens of a prompt and its reply.
        """
        self._tokenizer, self._mode = tokenizer, mode
        pages = 2 * slots * ceil_div(context, CacheConfig.page_size)
        drafts = cfg.dspark_block_size if mode.drafts else 0
        cache_cfg = CacheConfig(slots, pages, drafts="shared" if drafts else None)
        buckets = make_buckets(
            cache_cfg,
            prefill_tokens=[_PREFILL],
            prefill_requests=8,
            decode_requests=[slots],
            contexts=[context],
            bounded=mode.replay == "bounded",
            prompt_logprobs=False,
            drafts=drafts,
        )
        programs = Programs(cfg, cache_cfg, buckets, mode.numerics, progress=False)
        self._executor = JaxExecutor(params, programs)
        self._scheduler = SchedulerConfig(
            slots=slots,
            pages=pages,
            max_model_len=context,
            eos_id=tokenizer.eos_id,
            replay=ReplayRule(cfg.sliding_window, cfg.num_hidden_layers, mode.replay),
            prefill_tokens=_PREFILL,
            drafts=drafts,
            prefix_cache=mode.hits,
        )

    def answer(self, examples: Sequence[Example]) -> Answers:
        """The replies to all examples, against those wanted."""
        self._executor.reset()
        engine = Engine(Scheduler(self._scheduler), self._executor, _Silent())
        prompts = [e.prompt(self._tokenizer) for e in examples]
        wanted = [e.encoded(self._tokenizer)[0][len(p) :] for e, p in zip(examples, prompts, strict=True)]
        choices: list[Choice] = []
        for i, (prompt, reply) in enumerate(zip(prompts, wanted, strict=True)):
            if self._mode.hits:
                engine.submit(GenerationRequest(f"before {i}", prompt, 1, sampling=_GREEDY))
                _drain(engine)
            choices += engine.submit(GenerationRequest(str(i), prompt, len(reply), sampling=_GREEDY))
            if self._mode.hits:
                _drain(engine)
        _drain(engine)
        right = [choice.generated == reply.tolist() for choice, reply in zip(choices, wanted, strict=True)]
        rounds = sum(c.draft_rounds for c in choices)
        length = 1 + sum(c.accepted for c in choices) / rounds if rounds else None
        return Answers(float(np.mean(right)), length)


def _drain(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def text_loss(params: Params, cfg: ModelConfig, tokens: Int32[np.ndarray, "rows length"], numerics: Numerics) -> float:
    """Mean negative log-likelihood of rows of text, in nats per token."""
    logits = forward(params, tokens[:, :-1], cfg=cfg, numerics=numerics).logits
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens)[:, 1:, None], -1)
    return -float(jnp.mean(picked))


def drafts_and_routing(
    params: Params, cfg: ModelConfig, prompts: Sequence[np.ndarray], max_tokens: int, eos_id: int
) -> tuple[DraftStatistics, Float[np.ndarray, "layers experts"]]:
    """How well confidences predict what is accepted, over greedy replies of at most `max_tokens`, and the share of the
    prompts' tokens that each expert gets; a layer's shares add up to the experts per token.

    Args:
      prompts: all are run at once.
    """
    ends = [len(p) + max_tokens - 1 for p in prompts]
    cache, load, cache_cfg, pages = _prefilled(params, cfg, prompts, max_tokens)
    block = cfg.dspark_block_size
    bucket = DecodeBucket(len(prompts), max(len(p) for p in pages), 1 + block)
    batch = speculative_batch(
        cfg,
        cache_cfg,
        [SpeculativeRequest(i, pages[i], ends[i], block, sampling=_GREEDY) for i in range(len(prompts))],
        bucket,
    )
    cache, _ = draft_step(params, cache, batch, cfg=cfg)
    total, running = zero_statistics(block), np.ones(len(prompts), bool)
    for _ in range(max_tokens):
        cache, out = speculative_step(params, cache, batch, cfg=cfg)
        counts, tokens = (np.asarray(a) for a in (out.counts, out.tokens))
        statistics = step_statistics(
            out.confidences, out.verified, jnp.maximum(out.counts - 1, 0), running & (counts > 0)
        )
        total = jax.tree.map(jnp.add, total, statistics)
        # What comes behind the end of a reply tells nothing.
        running &= (counts > 0) & ~np.any((tokens == eos_id) & (np.arange(tokens.shape[1]) < counts[:, None]), 1)
        if not running.any():
            break
    return total, np.asarray(load) / sum(len(p) for p in prompts)


def _prefilled(
    params: Params, cfg: ModelConfig, prompts: Sequence[np.ndarray], max_tokens: int
) -> tuple[Cache, Array, CacheConfig, list[range]]:
    """A cache that holds the prompts, the tokens that each expert got, and where the prompts' pages are."""
    needed = [ceil_div(len(p) + max_tokens, CacheConfig.page_size) for p in prompts]
    ends = np.cumsum(needed)
    pages = [range(end - n, end) for n, end in zip(needed, ends, strict=True)]
    cache_cfg = CacheConfig(len(prompts), int(ends[-1]), drafts="shared")
    cache = init_cache(cfg, cache_cfg)
    bucket = PrefillBucket(_PREFILL, 1, max(needed))
    load = jnp.zeros((cfg.num_hidden_layers, cfg.n_routed_experts), jnp.int32)
    for slot, prompt in enumerate(prompts):
        cache = start_request(
            cache, np.int32(slot), *request_rows(prompt, (), {}, cfg.vocab_size), np.int32(len(prompt))
        )
        for start in range(0, len(prompt), _PREFILL):
            end = min(len(prompt), start + _PREFILL)
            chunk = PrefillChunk(prompt, start, end, slot, pages[slot], sampling=_GREEDY)
            batch = prefill_batch(cfg, cache_cfg, [chunk], bucket)
            cache, out = prefill_step(params, cache, batch, cfg=cfg)
            load = load + out.expert_load
    return cache, load, cache_cfg, pages
