"""Examines a trained model in every mode and prints tables for docs/default_model.md.

    python scripts/evaluate_default.py --model /tmp/trained --number 64

Every reply is held against the one wanted, token for token.
"""

import functools

import command_line
import numpy as np
from absl import flags

from dsv4jax.checkpoint.load import load_params
from dsv4jax.config import ModelConfig
from dsv4jax.tokenizer import Tokenizer
from dsv4jax.training.evaluation import MODES, Examiner, drafts_and_routing, text_loss
from dsv4jax.training.skills import SKILLS, held_out_examples
from dsv4jax.training.text import standard_library_texts

_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory. Default: the embedded model.")
_NUMBER = flags.DEFINE_integer("number", 32, "Held-out examples per skill, mode and length.", lower_bound=1)
_MODES = flags.DEFINE_multi_enum("mode", list(MODES), list(MODES), "Modes to examine.")
_SKILLS = flags.DEFINE_multi_enum("skill", list(SKILLS), list(SKILLS), "Skills to examine.")
_LENGTHS = flags.DEFINE_list("lengths", ["256", "512", "1024", "2048", "4096"], "Contexts to look keys up in, besides.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the examples.", lower_bound=0)

_SKILL_LENGTH = 960
"""Most tokens of a skill's conversation."""
_REPLY = 64
"""Room for a reply."""


def main() -> None:
    model = command_line.model_path(_MODEL.value)
    cfg, tokenizer = ModelConfig.from_checkpoint(model), Tokenizer.from_checkpoint(model)
    lengths = command_line.numbers("lengths", _LENGTHS.value, _REPLY + 1)
    params = load_params(model, cfg)
    made = functools.partial(held_out_examples, seed=_SEED.value, number=_NUMBER.value)
    examples = {name: made(name, budget=_SKILL_LENGTH) for name in _SKILLS.value}
    examples |= {f"look_up, {n}": made("look_up", budget=n - _REPLY) for n in lengths}

    print(f"Right replies of {_NUMBER.value} held-out examples each:\n")
    _row("mode", *examples)
    _row(*["---"] * (1 + len(examples)))
    accepted = {}
    for mode in _MODES.value:
        examiner = Examiner(params, cfg, tokenizer, MODES[mode], max(_SKILL_LENGTH, *lengths) + _REPLY)
        answers = {name: examiner.answer(of_skill) for name, of_skill in examples.items()}
        _row(mode, *(f"{100 * a.right:.0f} %" for a in answers.values()))
        if MODES[mode].drafts:
            accepted = {name: a.acceptance_length for name, a in answers.items()}
    if accepted:
        _row("acceptance length", *(f"{n:.2f}" if n else "-" for n in accepted.values()))

    print("\nHeld-out text, nats per token:\n")
    rows = _text_rows(tokenizer, 257, 16)
    for name in ("no rounding of activations and caches", "reference", "fast"):
        _row(name, f"{text_loss(params, cfg, rows, MODES[name].numerics):.4f}")

    prompts = [e.prompt(tokenizer) for of_skill in examples.values() for e in of_skill[:2]]
    print("\nReliability of the confidence head: predicted and real share of drafts that stand, by prediction:\n")
    found, shares = drafts_and_routing(params, cfg, prompts, 64, tokenizer.eos_id)
    for predicted, verified, accepted in zip(found.predicted, found.bin_verified, found.bin_accepted, strict=True):
        if verified:
            _row(f"{predicted / verified:.2f}", f"{accepted / verified:.2f}", f"{verified} drafts")

    print("\nLoad of each layer's busiest and idlest expert, over the mean:\n")
    for layer, share in enumerate(shares / shares.mean(1, keepdims=True)):
        _row(layer, f"{share.max():.2f}", f"{share.min():.2f}")


def _text_rows(tokenizer: Tokenizer, length: int, rows: int) -> np.ndarray:
    """Rows cut from held-out text."""
    ids = np.concatenate(
        [np.r_[tokenizer.bos_id, tokenizer.encode(t), tokenizer.eos_id] for t in standard_library_texts(held_out=True)]
    )
    rows = min(rows, len(ids) // length)
    return ids[: rows * length].reshape(rows, length).astype(np.int32)


def _row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    command_line.run(main)
