"""Trains the default model and writes it in the released layout.

    python scripts/train_default.py --directory /tmp/run --output /tmp/trained

Goes on where --directory left off. See docs/default_model.md.
"""

from pathlib import Path

import command_line
import jax
from absl import flags, logging

from dsv4jax.config import ModelConfig
from dsv4jax.tokenizer import Tokenizer
from dsv4jax.training.parameters import export_checkpoint, read_masters, write_masters
from dsv4jax.training.plan import DEFAULT_PLAN, default_config, read_plan
from dsv4jax.training.run import RunConfig, train
from dsv4jax.training.step import Optimisation, TrainState, resumed_state
from dsv4jax.training.text import standard_library_texts

_ROOT = Path(__file__).resolve().parent.parent
_DIRECTORY = flags.DEFINE_string("directory", None, "Of plan, checkpoints and log of the run.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Checkpoint directory to write; must not exist. Default: none.")
_TOKENIZER = flags.DEFINE_string("tokenizer", str(_ROOT / "dsv4jax/default_model/tokenizer.json"), "tokenizer.json.")
_CONFIG = flags.DEFINE_string("config", None, "Directory of a config.json to train. Default: the default model's.")
_PLAN = flags.DEFINE_string("plan", None, "JSON of the stages, as a run writes it. Default: the default model's.")
_SEED = flags.DEFINE_integer("seed", 0, "Of weights and data.", lower_bound=0)
_MINUTES = flags.DEFINE_float("minutes", 12.0, "Of training in all, where the plan has no numbers of steps.")
_STOP_AFTER = flags.DEFINE_float("stop_after", None, "Minutes after which to save and end. Default: at the plan's end.")
_RATE = flags.DEFINE_float("learning_rate", Optimisation.learning_rate, "At its peak.")
_EXAMINED = flags.DEFINE_integer("examined", 64, "Held-out examples per skill after each stage; 0 for none.")
_WORKERS = flags.DEFINE_integer("workers", 0, "Processes that make data; 0 for threads.", lower_bound=0)
_MASTERS_IN = flags.DEFINE_string("masters_in", None, "Begin with these masters and new moments, see --masters_out.")
_MASTERS_OUT = flags.DEFINE_string("masters_out", None, "Directory to keep the masters in, BF16, files below 16 MB.")


def main() -> None:
    logging.set_verbosity(logging.INFO)
    tokenizer = Tokenizer.from_file(_TOKENIZER.value)
    cfg = ModelConfig.from_checkpoint(_CONFIG.value) if _CONFIG.value else default_config(tokenizer)
    plan = read_plan(Path(_PLAN.value)) if _PLAN.value else DEFAULT_PLAN
    settings = Optimisation(learning_rate=_RATE.value)
    initial = None
    if _MASTERS_IN.value:
        masters, step = read_masters(Path(_MASTERS_IN.value), cfg)
        initial = resumed_state(masters, settings, step)
    needs_text = any(stage.mixture.text_share for stage in plan)
    texts = standard_library_texts(held_out=False) if needs_text else []
    logging.info("%s, %d texts of %d characters", jax.devices(), len(texts), sum(map(len, texts)))
    run = RunConfig(
        seed=_SEED.value,
        seconds=60 * _MINUTES.value,
        settings=settings,
        stop_after=None if _STOP_AFTER.value is None else 60 * _STOP_AFTER.value,
        examined=_EXAMINED.value,
        workers=_WORKERS.value,
    )

    def write_parts(state: TrainState) -> None:
        if _MASTERS_OUT.value:
            write_masters(Path(_MASTERS_OUT.value), state.masters, int(state.step))

    state, done = train(cfg, plan, tokenizer, texts, Path(_DIRECTORY.value), run, initial, write_parts)
    if _OUTPUT.value:
        export_checkpoint(state.masters, cfg, tokenizer, _OUTPUT.value)
    logging.info("step %d, %s", int(state.step), "done" if done else "to be resumed")


if __name__ == "__main__":
    command_line.run(main)
