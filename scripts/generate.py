"""Generates text from a checkpoint and streams it to the terminal.

python scripts/generate.py --prompt "Once upon a time"
python scripts/generate.py --model /path/to/checkpoint --chat "What is a latent?" --temperature 0.6 --seed 1
python scripts/generate.py --messages conversation.json
python scripts/generate.py --executables /path/to/exported --prompt "Once upon a time"
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line
import numpy as np
from absl import flags, logging
from executables import (
    EXECUTABLES,
    check_flags,
    load_exported,
    load_exported_params,
    model_directory,
    use_virtual_devices,
)

from dsv4jax.chat import ReplyParser, encode_chat
from dsv4jax.checkpoint.engram_tables import HostEngramTables
from dsv4jax.checkpoint.load import compressed_ids
from dsv4jax.config import ModelConfig
from dsv4jax.engine.engine_params import load_engine_params
from dsv4jax.engine.engine_shape import EngineShape
from dsv4jax.engine.generating import EngineGenerator, generation_shape
from dsv4jax.engine.programs import Programs
from dsv4jax.implementation import with_implementation
from dsv4jax.numerics import FAST, REFERENCE
from dsv4jax.sampling_settings import RequestSampling
from dsv4jax.tokenizer import StreamDecoder, Tokenizer

_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory. Default: the small embedded model (random weights).")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to continue as it stands; may be repeated.")
_CHAT = flags.DEFINE_multi_string("chat", [], "User message of a new conversation; may be repeated.")
_MESSAGES = flags.DEFINE_multi_string("messages", [], "JSON file with the messages of a conversation; may be repeated.")
_THINKING = flags.DEFINE_bool("thinking", True, "Let chat replies begin with reasoning.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "Tokens to generate per prompt.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0 = greedy.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "0 = no limit.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "1 = off.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "0 = off.")
_SEED = flags.DEFINE_integer("seed", None, "Default: a new one every run.")
_NUMERICS = flags.DEFINE_enum("numerics", "reference", ["reference", "fast"], "Where to round.")
_IMPLEMENTATION = command_line.implementation_flag()
_REPLAY = flags.DEFINE_enum(
    "replay", "exact", ["exact", "bounded"], "Decoder layers over the prompt: all of it, or its end."
)
_DRAFTS = flags.DEFINE_integer(
    "drafts",
    None,
    "Drafts that each request verifies in a step; 0 for plain decoding. Default: the draft's block, 0 with"
    " --engram=host.",
    0,
)
_ENGRAM = flags.DEFINE_enum("engram", "device", ["device", "host"], "Where the Engram tables live.")


class _Completion:
    """Text of a plain continuation."""

    def __init__(self, tokenizer: Tokenizer):
        self._decoder = StreamDecoder(tokenizer)

    def push(self, token: int) -> str:
        return self._decoder.push([token])

    def finish(self) -> str:
        return self._decoder.finish()


class _Reply:
    """Text of a chat reply, the end of the reasoning marked by a line."""

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray):
        self._parser = ReplyParser(tokenizer, prompt)
        self._channel = None

    def push(self, token: int) -> str:
        return "" if self._parser.ended else self._text(self._parser.push([token]))

    def finish(self) -> str:
        return self._text(self._parser.finish())

    def _text(self, deltas) -> str:
        text = ""
        for delta in deltas:
            if delta.channel != self._channel:
                text += {"reasoning": "[reasoning]\n", "content": "\n[answer]\n" if self._channel else ""}[
                    delta.channel
                ]
                self._channel = delta.channel
            text += delta.text
        return text


class _Screen:
    """Streams the first unfinished text; the others wait their turn."""

    def __init__(self, titles: list[str]):
        self._titles, self._waiting, self._done = titles, [""] * len(titles), [False] * len(titles)
        self._live = -1

    def write(self, index: int, text: str, done: bool = False) -> None:
        if self._live < 0:
            self._advance()
        self._done[index] = done
        if index == self._live:
            print(text, end="", flush=True)
            if done:
                self._advance()
        else:
            self._waiting[index] += text

    def _advance(self) -> None:
        while (self._live < 0 or self._done[self._live]) and self._live + 1 < len(self._titles):
            self._live += 1
            print(f"{'' if self._live == 0 else chr(10)}--- {self._titles[self._live]}")
            print(self._waiting[self._live], end="", flush=True)
        if all(self._done):
            print(flush=True)


def _messages(path: str) -> list:
    try:
        messages = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--messages={path}: {error}") from error
    if not isinstance(messages, list):
        raise ValueError(f"--messages={path}: expected a JSON list of messages")
    return messages


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    texts, chats = _PROMPT.value, [[{"role": "user", "content": text}] for text in _CHAT.value]
    chats += [_messages(path) for path in _MESSAGES.value]
    if not texts and not chats:
        raise ValueError("nothing to do: give --prompt, --chat or --messages")
    sampling = RequestSampling(
        temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value, min_p=_MIN_P.value, seed=_SEED.value
    )
    if EXECUTABLES.value:
        use_virtual_devices(check_flags((_NUMERICS, _IMPLEMENTATION, _REPLAY, _DRAFTS, _ENGRAM)))
    model = model_directory(_MODEL.value)
    cfg = ModelConfig.from_checkpoint(model)
    tokenizer = Tokenizer.from_checkpoint(model)
    prompts = [tokenizer.encode(text) for text in texts]
    prompts += [encode_chat(tokenizer, chat, thinking=_THINKING.value) for chat in chats]
    titles = [repr(text) for text in texts] + [repr(chat[-1].get("content")) for chat in chats]
    writers = [_Completion(tokenizer) for _ in texts]
    writers += [_Reply(tokenizer, p) for p in prompts[len(texts) :]]
    screen = _Screen(titles)
    left = [_MAX_TOKENS.value] * len(prompts)
    with contextlib.ExitStack() as stack:
        for index, token in _generate(stack, model, cfg, tokenizer, prompts, sampling):
            left[index] -= 1
            end = token == tokenizer.eos_id
            text = "" if end else writers[index].push(token)
            done = end or left[index] == 0
            screen.write(index, text + (writers[index].finish() if done else ""), done)


def _generate(
    stack: contextlib.ExitStack,
    model: Path,
    cfg: ModelConfig,
    tokenizer: Tokenizer,
    prompts: list[np.ndarray],
    sampling: RequestSampling,
) -> Iterator[tuple[int, int]]:
    """(prompt, token) of all prompts, interleaved; then the summary."""
    begin = time.perf_counter()

    def host_tables(shape: EngineShape) -> tuple[Any, ...]:
        return () if shape.tables_on_device else (HostEngramTables(model, cfg), compressed_ids(tokenizer, cfg))

    if EXECUTABLES.value:
        exported = load_exported(stack, cfg)
        shape = exported.shape
        programs = exported.programs(*host_tables(shape))
        middle = time.perf_counter()
        params = load_exported_params(exported, _MODEL.value, cfg)
        phases = "programs", "weights"
    else:
        shape = _shape(cfg, prompts)
        # What is wrong with a checkpoint is found before anything is compiled.
        params = load_engine_params(model, cfg, shape, shape.layout, progress=_MODEL.value is not None)
        middle = time.perf_counter()
        programs = Programs(cfg, shape.cache, shape.buckets, shape.numerics, shape.layout, *host_tables(shape))
        phases = "weights", "programs"
    ready = time.perf_counter()
    generator = EngineGenerator(
        shape,
        programs,
        params,
        prompts,
        max_tokens=_MAX_TOKENS.value,
        sampling=sampling,
        eos_id=tokenizer.eos_id,
        usable_ids=min(tokenizer.vocab_size, cfg.vocab_size),
    )
    first = None
    for index, tokens, _ in generator.run():
        first = first or time.perf_counter()
        yield from ((index, token) for token in tokens)
    drafts = generator.drafts
    accepted, verified = sum(drafts.accepted), sum(drafts.verified)
    outcome = "no drafts"
    if drafts.rounds:
        length = 1 + accepted / drafts.rounds
        outcome = f"{accepted} of {verified} drafts accepted, {length:.2f} tokens a verification"
    print(
        f"\nprefill {_rate(generator.prefill_tokens, generator.prefill_seconds)},"
        f" decode {_rate(generator.decode_tokens, generator.decode_seconds)}; {len(prompts)} prompts,"
        f" {outcome}\n"
        f"first token {first - begin:.1f} s after the start: {phases[0]} {middle - begin:.1f} s, {phases[1]}"
        f" {ready - middle:.1f} s; {'fast' if shape.numerics.fast else 'reference'} numerics,"
        f" {shape.numerics.implementation} implementation, {shape.replay} replay",
        file=sys.stderr,
    )


def _shape(cfg: ModelConfig, prompts: list[np.ndarray]) -> EngineShape:
    """What the flags say, sized for the prompts."""
    on_device = _ENGRAM.value == "device"
    drafts = command_line.drafts(cfg, _DRAFTS.value, on_device)
    numerics, _ = with_implementation(FAST if _NUMERICS.value == "fast" else REFERENCE, _IMPLEMENTATION.value, cfg)
    options = dict(max_tokens=_MAX_TOKENS.value, numerics=numerics, replay=_REPLAY.value)
    return generation_shape(cfg, prompts, drafts=drafts, tables_on_device=on_device, **options)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.2f} s" + (f" ({tokens / seconds:.1f} tokens/s)" if seconds else "")


if __name__ == "__main__":
    command_line.run(main)
