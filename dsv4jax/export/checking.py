"""Whether loaded programs do what the compiled ones do: what each of them returns, as a digest."""

import hashlib
from typing import Any

import jax
import numpy as np

from dsv4jax.batch import DecodeTokens, PrefillChunk, SpeculativeRequest, concatenate_batches
from dsv4jax.engine.programs import Bucket, DraftBucket, Programs, mask_programs, moving_experts, placement_names
from dsv4jax.export.manifest import program_name
from dsv4jax.params import Params
from dsv4jax.sampling import request_rows
from dsv4jax.sampling_settings import RequestSampling
from sharding.placement import initial_owners, placement_from_owners


def program_digests(
    programs: Programs, params: Params, expert_slots: int | None = None, draft_expert_slots: int | None = None
) -> dict[str, str]:
    """SHA-256 of what every step returns, by its name, and of the "cache" that all programs have left in the end.

    On every rank runs the same short request.

    Args:
      expert_slots, draft_expert_slots: as the programs were compiled for; the experts of `params` are in their first
        slots.

    Raises:
      RuntimeError: a program did not take the cache that it was given, which is donated.
    """
    cfg, cache_cfg, layout, buckets = programs.cfg, programs.cache_cfg, programs.layout, programs.buckets
    sampling = RequestSampling(temperature=0.7, seed=3, top_logprobs=2)
    slot = cache_cfg.slots - 1
    tokens = [min(b.tokens, b.pages * cache_cfg.page_size) for b in buckets.prefill] or [cache_cfg.page_size]
    prompt = np.arange(min(tokens) // 2, dtype=np.int32) % cfg.vocab_size
    most = max(bucket.pages for bucket in buckets.steps if not isinstance(bucket, DraftBucket))
    pages = np.arange(most, dtype=np.int32)[::-1] % cache_cfg.pages
    placements = {}
    for name, (layers, experts, slots) in moving_experts(cfg, expert_slots, draft_expert_slots).items():
        owners = initial_owners(layers, experts, layout.ranks, slots)
        placements[name] = jax.device_put(placement_from_owners(owners, experts, layout.ranks), layout.on_all)
    digests: dict[str, str] = {}

    def note(name: str, given: Any, cache: Any, output: Any = None) -> Any:
        # The cache is not read before the end: what the host has seen of it might keep it from being given away.
        if not all(leaf.is_deleted() for leaf in jax.tree.leaves(given)):
            raise RuntimeError(f"{name}: the cache was not donated")
        if output is not None:
            digests[name] = _digest(output)
        return cache

    def requests(bucket: Bucket) -> list[Any]:
        if bucket in buckets.prefill:
            return [PrefillChunk(prompt, 0, len(prompt), slot, pages, sampling=sampling)]
        if bucket in buckets.draft:
            return [SpeculativeRequest(slot, pages[:0], 0, 0, sampling=sampling)]
        if bucket in buckets.verify:
            drafts = bucket.tokens_per_request - 1
            return [SpeculativeRequest(slot, pages, len(prompt) + 1 + drafts, drafts, drafts, sampling)]
        history = prompt[: -cfg.engram_max_ngram_size : -1]
        return [DecodeTokens((int(prompt[0]),), len(prompt), slot, pages, sampling, history)]

    cache = note("cache", (), programs.init_cache())
    row = np.int32(slot), *request_rows(prompt, (), {1: 3.0}, cfg.vocab_size), np.int32(len(prompt))
    rows = layout.put(programs.start_rows([row] * len(layout.local_ranks)))
    cache = note("start", cache, programs.start_request(cache, *rows))
    for n, places in mask_programs(cfg, cache_cfg, buckets):
        slots = np.tile(cache_cfg.slots - 1 + np.arange(n, dtype=np.int32), len(layout.local_ranks))
        words = np.full((len(slots), places, -(-cfg.vocab_size // 32)), 0x7FFFFFFF, np.uint32)
        arguments = layout.put((slots, words))
        cache = note(program_name((n, places)), cache, programs.set_allowed_tokens(n, places)(cache, *arguments))
    for bucket in (*buckets.prefill, *buckets.draft, *buckets.verify, *buckets.decode):
        batches = [programs.batch(requests(bucket), bucket)] * len(layout.local_ranks)
        batch = layout.put(concatenate_batches(batches))
        options = {name: placements[name] for name in placement_names(bucket) if name in placements}
        new, output = programs.step(bucket)(params, cache, batch, **options)
        cache = note(program_name(bucket), cache, new, output)
    return {**digests, "cache": _digest(cache)}


def _digest(arrays: Any) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(arrays):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def compare_programs(
    compiled: Programs,
    loaded: Programs,
    params: Params,
    expert_slots: int | None = None,
    draft_expert_slots: int | None = None,
) -> None:
    """Raises RuntimeError with the names of programs that do not return the same bits, or as `program_digests`."""
    slots = expert_slots, draft_expert_slots
    expected, seen = (program_digests(programs, params, *slots) for programs in (compiled, loaded))
    if other := [name for name, digest in expected.items() if seen[name] != digest]:
        raise RuntimeError(f"loaded programs return other bits than the compiled ones: {', '.join(other)}")
