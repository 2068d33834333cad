"""Rows of tokens to train on: examples of the skills and plain text, packed; a pure function of seed and row number."""

import dataclasses
from collections.abc import Iterator, Sequence

import grain
import numpy as np
from jaxtyping import Float32, Int32

from dsv4jax.tokenizer import Tokenizer
from dsv4jax.training.skills import SKILLS

Row = dict[str, np.ndarray]
Piece = tuple[Int32[np.ndarray, " tokens"], Float32[np.ndarray, " tokens"]]
_LEAST = 24
"""Room in a row that is left empty."""
_TRIES = 8


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What rows are made of.

    Raises:
      ValueError: an unknown skill, or nothing at all.
    """

    skills: tuple[str, ...] = tuple(SKILLS)
    text_share: float = 0.2
    """Share of the pieces that are plain text."""

    def __post_init__(self):
        unknown = sorted(set(self.skills) - set(SKILLS))
        if unknown:
            raise ValueError(f"skills = {unknown}: allowed are {sorted(SKILLS)}")
        if not self.skills and not self.text_share:
            raise ValueError("skills = (): with text_share = 0 there is nothing to train on")


class Rows(grain.sources.RandomAccessDataSource):
    """Rows of `length` + 1 tokens with the weight of each as a target: 1 in replies and plain text, else 0."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], mixture: Mixture, length: int, seed: int, rows: int):
        self._tokenizer, self._texts, self._mixture = tokenizer, texts, mixture
        self._length, self._seed, self._rows = length, seed, rows
        if mixture.text_share and not texts:
            raise ValueError(f"texts: none, but text_share = {mixture.text_share}")

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Row:
        random = np.random.default_rng([self._seed, 0, self._length, index])
        tokens = np.full(self._length + 1, self._tokenizer.pad_id, np.int32)
        weights = np.zeros(self._length + 1, np.float32)
        used = 0
        while (room := self._length + 1 - used) >= _LEAST:
            piece = self._piece(random, room)
            if piece is None:
                break
            part = slice(used, used + len(piece[0]))
            tokens[part], weights[part] = piece
            used = part.stop
        return {"tokens": tokens, "weights": weights}

    def _piece(self, random: np.random.Generator, room: int) -> Piece | None:
        """Something that fits into `room`; None if nothing was found."""
        for _ in range(_TRIES):
            if not self._mixture.skills or random.random() < self._mixture.text_share:
                ids = self._tokenizer.encode(self._texts[int(random.integers(len(self._texts)))])
                ids = np.concatenate([[self._tokenizer.bos_id], ids, [self._tokenizer.eos_id]]).astype(np.int32)[:room]
                return ids, (np.arange(len(ids)) > 0).astype(np.float32)
            name = self._mixture.skills[int(random.integers(len(self._mixture.skills)))]
            example = SKILLS[name](random, room)
            if example.held_out:
                continue
            ids, learnt = example.encoded(self._tokenizer)
            if len(ids) <= room:
                return ids, learnt.astype(np.float32)
        return None


def batches(source: Rows, batch: int, first: int, workers: int = 0) -> Iterator[Row]:
    """Batches of consecutive rows from batch number `first` on, to the end of the source.

    Args:
      workers: processes that make them; 0 for threads of this one.
    """
    dataset = grain.MapDataset.source(source)[first * batch :].batch(batch, drop_remainder=True)
    threads, ahead = (0, 0) if workers else (2, 4)
    rows = dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead))
    if workers:
        rows = rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))
    return iter(rows)
