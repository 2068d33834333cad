"""An engine for tests of the server: gives tokens at a fixed rate and remembers what became of each request."""

import argparse
import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from fastapi import FastAPI

import dsv4jax
from dsv4jax.engine.draft_totals import DraftTotals
from dsv4jax.engine.records import EngineStats, StepRecord
from dsv4jax.engine.request import EngineStopped, GenerationRequest, TokenChunk
from dsv4jax.server.app import Profiler, create_app
from dsv4jax.server.config import ServerConfig
from dsv4jax.server.context import ServerContext
from dsv4jax.server.metrics import PrometheusObserver
from dsv4jax.server.run import listening, serve
from dsv4jax.tokenizer import Tokenizer


class FakeEngine:
    """Tokens of a request that nobody reads gather in one chunk, as the real engine has it.

    A request with the stop token FLOOD gets its tokens one by one as fast as they are read.
    """

    FLOOD = 9
    vocab_size = 805

    def __init__(self, tokens_per_second: float = 50.0, max_model_len: int = 4096, token: int = 70):
        self.max_model_len = max_model_len
        self.is_alive = True
        self.is_ready = True
        self.failure: Exception | None = None
        self.running: set[str] = set()
        self.ended: dict[str, str] = {}
        self.chunks = 0
        self.output_tokens = 0
        self.cache_resets = 0
        self.drained = False
        self._interval = 1 / tokens_per_second
        self._token = token
        self._aborted: set[str] = set()

    def check(self, *requests: GenerationRequest) -> None:
        if self.drained:
            raise EngineStopped("the engine has ended")
        if self.failure is not None:
            raise self.failure

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        self.check(request)
        self.running.add(request.request_id)
        self.ended[request.request_id] = "closed"
        begin, given = time.monotonic(), 0
        flood = self.FLOOD in request.stop_token_ids
        try:
            while given < request.max_tokens:
                await asyncio.sleep(0 if flood else max(0.0, begin + (given + 1) * self._interval - time.monotonic()))
                if request.request_id in self._aborted:
                    self.ended[request.request_id] = "abort"
                    yield TokenChunk(0, finish_reason="abort")
                    return
                due = given + 1 if flood else max(int((time.monotonic() - begin) / self._interval), given + 1)
                due = min(due, request.max_tokens)
                finish = "length" if due == request.max_tokens else None
                if finish:
                    self.ended[request.request_id] = finish
                self.chunks += 1
                self.output_tokens += due - given
                yield TokenChunk(0, (self._token,) * (due - given), finish_reason=finish)
                given = due
        finally:
            self.running.discard(request.request_id)

    def stop(self, request_id: str, index: int) -> None:
        raise AssertionError("nothing of what the fake gives ends a choice early")

    def abort(self, request_ids: Sequence[str]) -> int:
        found = self.running.intersection(request_ids)
        self._aborted |= found
        return len(found)

    def reset_prefix_cache(self) -> None:
        self.cache_resets += 1

    def stats(self) -> EngineStats:
        return engine_stats(running=len(self.running), output_tokens=self.output_tokens)

    async def drain(self, timeout: float) -> None:
        self.drained = True


def engine_stats(**values: float) -> EngineStats:
    """Statistics that are 0 where nothing is said."""
    names = EngineStats.__dataclass_fields__
    fixed = {"slots": 64, "pages": 1000, "ranks": (), "drafts": DraftTotals.zero(5), "balance": {}}
    return EngineStats(**{**dict.fromkeys(names, 0), **fixed, **values})


def step_record(number: int = 1, **values) -> StepRecord:
    """A step that is 0 where nothing is said."""
    fields = dict.fromkeys(StepRecord.__dataclass_fields__, 0)
    return StepRecord(**{**fields, "inter_token_seconds": np.zeros(0), "number": number, **values})


def make_app(engine: FakeEngine, profiler: Profiler | None = None, **config) -> FastAPI:
    """The application over the embedded tokenizer, on a free port; `app.state.observer` is its observer."""
    observer = PrometheusObserver("toy", engine.max_model_len, {"block_size": 64})
    context = ServerContext(
        engine=engine,
        tokenizer=Tokenizer.from_checkpoint(Path(dsv4jax.__file__).parent / "default_model"),
        grammars=None,
        model_names=("toy", "org/toy"),
        threads=ThreadPoolExecutor(2),
        created=1_700_000_000,
        system_fingerprint="fp",
    )
    app = create_app(context, ServerConfig(**{"port": 0, **config}), observer, profiler)
    app.state.observer = observer
    return app


def main() -> None:
    """A server in its own process, for tests of signals; its log says where it listens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--shutdown_timeout", type=float, default=30)
    parser.add_argument("--tokens_per_second", type=float, default=50)
    flags = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    app = make_app(FakeEngine(flags.tokens_per_second), uds=flags.uds, shutdown_timeout=flags.shutdown_timeout)
    with listening(app.state.config) as listener:
        serve(app, listener)


if __name__ == "__main__":
    main()
