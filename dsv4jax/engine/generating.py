"""Text generation by the programs of an engine: an engine without a server."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from dsv4jax.batch import token_ids
from dsv4jax.engine.engine import Engine
from dsv4jax.engine.engine_shape import EngineShape, scheduler_config
from dsv4jax.engine.jax_executor import JaxExecutor
from dsv4jax.engine.programs import Programs
from dsv4jax.engine.records import Observer, StepRecord
from dsv4jax.engine.request import GenerationRequest
from dsv4jax.engine.scheduler import Scheduler
from dsv4jax.params import Params
from dsv4jax.sampling_settings import RequestSampling


class EngineGenerator(Observer):
    """Generates continuations of all prompts, as `generate.Generator` does, in the buckets that programs have.

    Attributes:
      steps, prompt_tokens, seconds: steps that were run, tokens of prompts in them, and their time on the device.
    """

    def __init__(
        self,
        shape: EngineShape,
        programs: Programs,
        params: Params,
        prompts: Sequence[np.ndarray],
        *,
        max_tokens: int,
        sampling: RequestSampling,
        eos_id: int,
        usable_ids: int | None = None,
    ):
        """Checks the prompts; request i takes seed + i.

        Raises:
          ValueError: a prompt that is empty, has ids out of range, or with `max_tokens` exceeds the context; programs
            whose experts move.
        """
        for name, slots in shape.slots_of_experts.items():
            if slots is not None:
                raise ValueError(f"{name} = {slots}: must be None, nothing moves experts here")
        self.steps = self.prompt_tokens = 0
        self.seconds = 0.0
        executor = JaxExecutor(params, programs, usable_ids=usable_ids)
        scheduler = Scheduler(scheduler_config(programs.cfg, shape, eos_id))
        self._engine = Engine(scheduler, executor, self)
        self._index = {}
        for i, prompt in enumerate(prompts):
            seeded = sampling if sampling.seed is None else dataclasses.replace(sampling, seed=sampling.seed + i)
            ids = token_ids(prompt, programs.cfg.vocab_size, f"prompt {i}")
            request = GenerationRequest(f"{i}", ids, max_tokens, sampling=seeded)
            (sequence,) = self._engine.submit(request)
            self._index[sequence] = i

    def run(self) -> Iterator[tuple[int, list[int], bool]]:
        """Yields (request, its next token ids, whether it has ended) as tokens arrive, requests interleaved.

        Raises:
          RuntimeError: a request ended with an error.
        """
        while not self._engine.idle:
            for sequence in self._engine.step():
                if sequence.error is not None:
                    raise RuntimeError(f"prompt {self._index[sequence]}: {sequence.error}")
                first, sequence.unsent = sequence.unsent, len(sequence.generated)
                yield self._index[sequence], sequence.generated[first:], sequence.finish_reason is not None

    def step(self, record: StepRecord) -> None:
        """The engine reports a step."""
        self.steps += 1
        self.prompt_tokens += record.computed_tokens
        self.seconds += record.device_seconds
