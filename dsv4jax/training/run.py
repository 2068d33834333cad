"""A run of training: stages one after the other, checkpoints, resuming."""

import concurrent.futures
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from absl import logging

from dsv4jax.checkpoint.load import compressed_ids
from dsv4jax.config import ModelConfig
from dsv4jax.numerics import REFERENCE, Numerics
from dsv4jax.tokenizer import Tokenizer
from dsv4jax.training.data import Rows, batches
from dsv4jax.training.examination import examine, replies_right
from dsv4jax.training.plan import Plan, Stage, learning_rate, read_plan, write_plan
from dsv4jax.training.step import Optimisation, TrainState, abstract_state, init_state, train_step

_MEASURED = 8
"""Steps by which the speed of a stage is measured."""
_LOG_EVERY = 20
# As the steps are compiled: roundings to a narrow type are part of the model.
_OPTIONS = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a run is done; all but the last four decide what comes out.

    Args:
      seed: of weights and data.
      seconds: of training in all, for stages without a number of steps.
      numerics: where to round while training.
      stop_after: seconds after which this process saves and ends, to be resumed; None to go on to the end.
      save_every: seconds between checkpoints.
      examined: examples per skill at the end of a stage.
      workers: processes that make data.
    """

    seed: int = 0
    seconds: float = 720.0
    settings: Optimisation = dataclasses.field(default_factory=Optimisation)
    numerics: Numerics = REFERENCE
    stop_after: float | None = None
    save_every: float = 120.0
    examined: int = 64
    workers: int = 0


def train(
    cfg: ModelConfig,
    plan: Plan,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    directory: Path,
    run: RunConfig,
    initial: TrainState | None = None,
    on_checkpoint: Callable[[TrainState], None] = lambda state: None,
) -> tuple[TrainState, bool]:
    """Trains, or goes on where `directory` left off: from the same seed and steps the result is the same.

    The directory holds `plan.json` with the steps as found, checkpoints of Orbax, and `log.jsonl`.

    Args:
      initial: what to begin with in a new directory; default: random masters.
      on_checkpoint: called with every state that is saved.

    Returns:
      The last state, and whether the plan is done.
    """
    started = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / "plan.json").is_file():
        plan = read_plan(directory / "plan.json")
    token_map = compressed_ids(tokenizer, cfg)
    keep = ocp.training.preservation_policies.LatestN(2)
    checkpoints = ocp.training.Checkpointer((directory / "checkpoints").absolute(), preservation_policy=keep)
    if checkpoints.latest is not None:
        state = checkpoints.load(checkpoints.latest, abstract_state(cfg, run.settings))
    else:
        state = initial or init_state(cfg, run.seed, run.settings)
    saved = 0.0

    def save() -> None:
        checkpoints.save(int(state.step), state, overwrite=True)
        on_checkpoint(state)

    with _Log(directory / "log.jsonl") as log, concurrent.futures.ThreadPoolExecutor(1) as background:
        programs, examinations = {}, {}
        for i, stage in list(enumerate(plan))[_position(plan, int(state.step))[0] :]:
            programs[i] = background.submit(compile_stage, state, token_map, cfg, stage, run)
            if run.examined and stage.phase != "draft":
                examinations[i] = background.submit(_compile_examination, state, token_map, cfg, stage, run)
        while (place := _position(plan, int(state.step)))[0] < len(plan):
            index, first = place
            program = programs[index].result()
            if plan[index].steps is None:
                seconds = _seconds_per_step(program, state, token_map, plan[index])
                plan = _with_steps(plan, index, max(1, int(run.seconds * plan[index].share / seconds)))
                write_plan(directory / "plan.json", plan)
                logging.info("stage %d: %.4f s per step, %d steps", index, seconds, plan[index].steps)
            stage = plan[index]
            rows = Rows(tokenizer, texts, stage.mixture, stage.length, run.seed + index, stage.steps * stage.batch)
            for count, row in enumerate(batches(rows, stage.batch, first, run.workers), first + 1):
                rate = np.float32(learning_rate(plan, index, count - 1))
                state, report = program(state, row["tokens"], row["weights"], rate, token_map)
                if count % _LOG_EVERY and count < stage.steps:
                    continue
                seconds = time.monotonic() - started
                log(stage=index, step=count, seconds=seconds, rate=rate, **jax.device_get(report))
                stop = run.stop_after is not None and seconds > run.stop_after
                if stop or seconds - saved > run.save_every:
                    save()
                    saved = seconds
                if stop:
                    return state, False
            if index in examinations:
                right = functools.partial(_right, examinations[index].result(), state.masters, token_map)
                exact = examine(right, tokenizer, stage.mixture.skills, run.examined, stage.length, run.seed)
                log(stage=index, step=stage.steps, seconds=time.monotonic() - started, exact=exact)
        write_plan(directory / "plan.json", plan)
        save()
    return state, True


def _right(program: Callable[..., Any], masters: Any, token_map: np.ndarray, *rows: np.ndarray) -> np.ndarray:
    return program(masters, *rows, token_map)


def _seconds_per_step(program: Callable[..., Any], state: TrainState, token_map: np.ndarray, stage: Stage) -> float:
    """Of a stage, by steps that come to nothing."""
    state = jax.tree.map(jnp.copy, state)
    tokens = np.zeros((stage.batch, stage.length + 1), np.int32)
    for n in range(_MEASURED + 2):
        if n == 2:
            jax.block_until_ready(state)
            begin = time.monotonic()
        state, _ = program(state, tokens, np.ones(tokens.shape, np.float32), np.float32(0), token_map)
    jax.block_until_ready(state)
    return (time.monotonic() - begin) / _MEASURED


def _position(plan: Plan, step: int) -> tuple[int, int]:
    """Stage and step in it after so many steps in all."""
    for index, stage in enumerate(plan):
        if stage.steps is None or step < stage.steps:
            return index, step
        step -= stage.steps
    return len(plan), 0


def _with_steps(plan: Plan, index: int, steps: int) -> Plan:
    return (*plan[:index], dataclasses.replace(plan[index], steps=steps), *plan[index + 1 :])


def compile_stage(
    state: TrainState, token_map: np.ndarray, cfg: ModelConfig, stage: Stage, run: RunConfig
) -> Callable[..., Any]:
    """The program of a stage."""
    shape = (stage.batch, stage.length + 1)
    begin = time.monotonic()
    lowered = train_step.lower(
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state),
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((), jnp.float32),
        token_map,
        cfg=cfg,
        settings=run.settings,
        phase=stage.phase,
        numerics=run.numerics,
    )
    compiled = lowered.compile(_OPTIONS)
    logging.info("compiled %s of %s in %.0f s", stage.phase, shape, time.monotonic() - begin)
    return compiled


def _compile_examination(
    state: TrainState, token_map: np.ndarray, cfg: ModelConfig, stage: Stage, run: RunConfig
) -> Callable[..., Any]:
    """The program that examines a stage of the model."""
    shape = (run.examined, stage.length)
    rows = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    masters = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state.masters)
    select = stage.phase != "dense"
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    lowered = replies_right.lower(masters, tokens, rows, rows, token_map, cfg=cfg, numerics=run.numerics, select=select)
    return lowered.compile(_OPTIONS)


class _Log:
    """Appends JSON lines, and says the same on the screen."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> Callable[..., None]:
        self._file = self._path.open("a", encoding="utf-8")
        return self._write

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, **values: Any) -> None:
        line = json.dumps(values, default=lambda v: np.round(v, 5).tolist())
        print(line, file=self._file, flush=True)
        logging.info("%s", line)
