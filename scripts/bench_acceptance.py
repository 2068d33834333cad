"""How many drafts of a model stand, by position and task, and how well its confidences predict that.

    python scripts/bench_acceptance.py --report out
    python scripts/bench_acceptance.py --model /path/to/checkpoint --prompts prompts.jsonl --max_tokens 256 --report out

Greedy replies, every draft verified whatever its confidence. Without `--prompts` the tasks are the held-out examples of
the skills that the embedded model is taught: they say something about a model that was trained on them only. A line of
`--prompts` is a JSON object with `task` and `prompt`, a text that is continued as it is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import command_line
import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, text_table
from dsv4jax.bench.steps.cases import caught
from dsv4jax.bench.steps.drafts import acceptance, reliability
from dsv4jax.checkpoint.load import load_params
from dsv4jax.compilation_cache import use_compilation_cache
from dsv4jax.config import ModelConfig
from dsv4jax.draft_statistics import DraftStatistics
from dsv4jax.tokenizer import Tokenizer
from dsv4jax.training.evaluation import drafts_and_routing
from dsv4jax.training.skills import SKILLS, held_out_examples

_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory. Default: the embedded model.")
_PROMPTS = flags.DEFINE_string(
    "prompts", None, "JSON lines with task and prompt. Default: held-out examples of skills."
)
_SKILLS = flags.DEFINE_multi_enum("skill", list(SKILLS), list(SKILLS), "Skills to take without --prompts.")
_NUMBER = flags.DEFINE_integer("number", 8, "Examples of a skill.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "Most tokens of a reply.", lower_bound=2)
_SEED = flags.DEFINE_integer("seed", 0, "Of the examples.", lower_bound=0)
_CACHE = command_line.compile_cache_flag()
_REPORT = command_line.report_flag()

_LENGTH = 960
"""Most tokens of an example."""


def read_prompts(path: str) -> dict[str, list[str]]:
    """Prompts by task.

    Raises:
      ValueError: a line is not of this form; names it.
    """
    found: dict[str, list[str]] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if (
            not isinstance(row, dict)
            or row.keys() != {"task", "prompt"}
            or not all(isinstance(value, str) and value for value in row.values())
        ):
            raise ValueError(
                f"{path}: line {number}: must be an object with the texts task and prompt, and nothing else"
            )
        found.setdefault(row["task"], []).append(row["prompt"])
    if not found:
        raise ValueError(f"{path}: must have at least one line")
    return found


def prompts_by_task(tokenizer: Tokenizer) -> dict[str, list[np.ndarray]]:
    """Ids of the prompts that the flags ask for."""
    if _PROMPTS.value:
        texts = read_prompts(_PROMPTS.value)
        return {
            task: [np.int32([tokenizer.bos_id, *tokenizer.encode(text)]) for text in of_task]
            for task, of_task in texts.items()
        }
    return {
        skill: [
            example.prompt(tokenizer)
            for example in held_out_examples(skill, seed=_SEED.value, number=_NUMBER.value, budget=_LENGTH)
        ]
        for skill in _SKILLS.value
    }


def empty_result(given: Mapping[str, Any]) -> Result:
    """What is filled."""
    share = Axis("share of drafts")
    return Result(
        "acceptance",
        dict(given),
        keys={"tasks": ("task",), "acceptance": ("task", "position"), "reliability": ("task", "survival")},
        control={"what": "confidences that know: predicted and accepted are equal in every row of reliability"},
        ceiling={"what": "all drafts accepted: one token more than there are drafts, of every verification"},
        plots=[
            Plot("bar", "Tokens of a verification", "tasks", "task", ("acceptance_length",), Axis("task"),
                 Axis("accepted drafts and the token after them", "tokens")),
            Plot("line", "Acceptance by position", "acceptance", "position", ("accepted",), Axis("position"), share,
                 by=("task",)),
            Plot("scatter", "Reliability of confidences", "reliability", "predicted", ("accepted",),
                 Axis("predicted survival"), share, by=("task",)),
        ],
    )  # fmt: skip


def task_row(task: str, prompts: int, statistics: DraftStatistics) -> dict[str, Any]:
    """A task in one line."""
    rounds, verified = int(statistics.rounds), int(np.sum(statistics.bin_verified))
    stood = int(np.sum(statistics.bin_accepted))
    error = np.abs(np.asarray(statistics.predicted) - np.asarray(statistics.bin_accepted)).sum()
    return {
        "task": task,
        "prompts": prompts,
        "verifications": rounds,
        "acceptance_length": 1 + stood / rounds if rounds else None,
        "accepted": stood / verified if verified else None,
        "calibration_error": float(error / verified) if verified else None,
    }


def main() -> None:
    use_compilation_cache(_CACHE.value)
    model = command_line.model_path(_MODEL.value)
    cfg, tokenizer = ModelConfig.from_checkpoint(model), Tokenizer.from_checkpoint(model)
    tasks = prompts_by_task(tokenizer)
    given = conditions(
        model=_MODEL.value or "the embedded model",
        layout="one device",
        flags=flag_values(globals()),
        seed=_SEED.value,
        devices=jax.devices(),
    )
    params = load_params(model, cfg)
    with reported(_REPORT.value, empty_result(given)) as result:
        for task, prompts in tqdm(tasks.items(), unit="task"):
            found = caught(
                lambda prompts=prompts: drafts_and_routing(params, cfg, prompts, _MAX_TOKENS.value, tokenizer.eos_id)[0]
            )
            if isinstance(found, Exception):
                result.add_row("tasks", {"task": task, "error": f"{type(found).__name__}: {found}"})
                continue
            row = task_row(task, len(prompts), found)
            result.add_row("tasks", row)
            result.add_rows("acceptance", [{"task": task, **one} for one in acceptance(found)])
            result.add_rows("reliability", [{"task": task, **one} for one in reliability(found)])
            if row["acceptance_length"] is not None:
                result.verdicts.append(
                    f"{task.replace('_', ' ')}: {row['acceptance_length']:.2f} tokens of a verification;"
                    f" confidences are off by {row['calibration_error']:.2f} on average"
                )
        for table in result.rows:
            print(f"\n{table}\n{text_table(result.rows[table])}")


if __name__ == "__main__":
    command_line.run(main)
