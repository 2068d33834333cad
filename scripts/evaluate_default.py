"""Examines a trained model in every mode and prints tables for docs/default_model.md.

    python scripts/evaluate_default.py --model /tmp/trained --number 64

Every reply is held against the one wanted, token for token.
"""

import importlib.resources
import sys
from pathlib import Path

import numpy as np
from absl import app, flags

from dsv4jax.checkpoint.load import load_params
from dsv4jax.config import ModelConfig
from dsv4jax.tokenizer import Tokenizer
from dsv4jax.training.evaluation import MODES, Examiner, draft_reliability, routing_shares, text_loss
from dsv4jax.training.skills import SKILLS, held_out_examples
from dsv4jax.training.text import standard_library_texts

_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory. Default: the embedded model.")
_NUMBER = flags.DEFINE_integer("number", 32, "Held-out examples per skill, mode and length.", lower_bound=1)
_MODES = flags.DEFINE_multi_enum("mode", list(MODES), list(MODES), "Modes to examine.")
_SKILLS = flags.DEFINE_multi_enum("skill", list(SKILLS), list(SKILLS), "Skills to examine.")
_CONTEXT = flags.DEFINE_integer("context", 1024, "Longest prompt and reply, for all modes.")
_LENGTHS = flags.DEFINE_list("lengths", ["256", "512", "1024", "2048", "4096"], "Contexts to look keys up in.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the examples.", lower_bound=0)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        _run()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _run() -> None:
    model = Path(_MODEL.value) if _MODEL.value else importlib.resources.files("dsv4jax") / "default_model"
    cfg, tokenizer = ModelConfig.from_checkpoint(model), Tokenizer.from_checkpoint(model)
    params = load_params(model, cfg)
    examples = {
        name: held_out_examples(name, _SEED.value, _NUMBER.value, _CONTEXT.value - 64) for name in _SKILLS.value
    }

    print(f"Right replies of {_NUMBER.value} held-out examples per skill, contexts up to {_CONTEXT.value} tokens:\n")
    _row("mode", *examples)
    _row(*["---"] * (1 + len(examples)))
    lengths = {}
    for mode in _MODES.value:
        examiner = Examiner(params, cfg, tokenizer, MODES[mode], _CONTEXT.value)
        answers = {name: examiner.answer(of_skill) for name, of_skill in examples.items()}
        _row(mode, *(f"{100 * a.right:.0f} %" for a in answers.values()))
        if MODES[mode].drafts:
            lengths = {name: a.acceptance_length for name, a in answers.items()}
    if lengths:
        _row("acceptance length", *(f"{n:.2f}" for n in lengths.values()))

    if "look_up" in examples:
        print("\nKeys looked up, by length of the context:\n")
        for length in map(int, _LENGTHS.value):
            of_length = held_out_examples("look_up", _SEED.value, _NUMBER.value, length - 64)
            answers = Examiner(params, cfg, tokenizer, MODES["reference"], length).answer(of_length)
            _row(length, f"{100 * answers.right:.0f} %")

    print("\nHeld-out text, nats per token:\n")
    rows = _text_rows(tokenizer, 257, 16)
    for name in ("no rounding of activations and caches", "reference", "fast"):
        _row(name, f"{text_loss(params, cfg, rows, MODES[name].numerics):.4f}")

    prompts = [e.prompt(tokenizer) for of_skill in examples.values() for e in of_skill[:2]]
    print("\nReliability of the confidence head: predicted and real share of drafts that stand, by prediction:\n")
    found = draft_reliability(params, cfg, prompts, 64, tokenizer.eos_id)
    for predicted, verified, accepted in zip(found.predicted, found.bin_verified, found.bin_accepted, strict=True):
        if verified:
            _row(f"{predicted / verified:.2f}", f"{accepted / verified:.2f}", f"{verified} drafts")

    print("\nLoad of each layer's busiest and idlest expert, over the mean:\n")
    shares = routing_shares(params, cfg, prompts)
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
    app.run(main)
