"""What the scheduler knows of each slot, as arrays over the slots of all ranks.

A step of hundreds of decoding requests so costs the host a few numpy calls and little Python per request, on however
many ranks they are.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64, Shaped

from dsv4jax.engine.scheduler_config import SchedulerConfig
from dsv4jax.engine.sequence import Sequence
from dsv4jax.sampling_settings import MAX_PAUSE_TOKENS

Rows = Int64[np.ndarray, " rows"]
"""Some slots, by their place in the arrays, in ascending order."""


@dataclasses.dataclass(eq=False)
class Slots:
    """The slots of all ranks, rank by rank; or views of those of one rank."""

    sequences: Shaped[np.ndarray, " slots"]
    """The choice of each slot, or None."""
    epochs: Int64[np.ndarray, " slots"]
    """Changes when the slot loses its choice."""
    decoding: Bool[np.ndarray, " slots"]
    lengths: Int32[np.ndarray, " slots"]
    """Prompt and generated tokens known to the host."""
    again: Int32[np.ndarray, " slots"]
    """The last ones of these, to be run again one by one."""
    unread: Int32[np.ndarray, " slots"]
    """Steps in flight that bring tokens."""
    ahead: Int32[np.ndarray, " slots"]
    """The most tokens they bring."""
    ends: Int32[np.ndarray, " slots"]
    """Prompt and `max_tokens`."""
    least_drafts: Int32[np.ndarray, " slots"]
    most_drafts: Int32[np.ndarray, " slots"]
    draft_contexts: Int32[np.ndarray, " slots"]
    """No drafts from this position on."""
    draft_counts: Int32[np.ndarray, " slots"]
    """How many of `drafts` there are."""
    drafts: Int32[np.ndarray, "slots drafts"]
    """Those that the newest step read has left behind the newest token; kept for choices with a mask."""
    pause_tokens: Int32[np.ndarray, "slots pauses"]
    """Tokens behind which the mask of the steps in flight may no longer hold; -1 for none."""
    last_times: Float64[np.ndarray, " slots"]
    """When the last known token came."""
    eos: Int32[np.ndarray, " slots"]
    """Ends the choice; -1 if none does."""
    watched: Bool[np.ndarray, " slots"]
    """Whether each token takes more than a look for EOS and the end: stop tokens, a mask, log-probabilities."""
    masked: Bool[np.ndarray, " slots"]
    covered: Int32[np.ndarray, " slots"]
    """Tokens for which there are pages."""
    page_table: Int32[np.ndarray, "slots pages"]

    @classmethod
    def empty(cls, cfg: SchedulerConfig) -> "Slots":
        """All slots without a choice."""
        slots = cfg.ranks * cfg.slots
        kinds = {"sequences": object, "epochs": np.int64, "last_times": np.float64}
        kinds |= dict.fromkeys(("decoding", "watched", "masked"), bool)
        wide = {
            "drafts": np.zeros((slots, cfg.drafts), np.int32),
            "pause_tokens": np.full((slots, MAX_PAUSE_TOKENS), -1, np.int32),
            "page_table": np.zeros((slots, -(-cfg.max_model_len // cfg.page_size)), np.int32),
        }
        names = [f.name for f in dataclasses.fields(cls) if f.name not in wide]
        narrow = {name: np.zeros(slots, kinds.get(name, np.int32)) for name in names}
        return cls(**narrow | wide | {"sequences": np.full(slots, None, object)})

    def of_rank(self, number: int, slots: int) -> "Slots":
        """Views of the slots of one rank, which has `slots` of them."""
        place = slice(number * slots, (number + 1) * slots)
        return Slots(**{f.name: getattr(self, f.name)[place] for f in dataclasses.fields(self)})

    def start(self, slot: int, sequence: Sequence, cfg: SchedulerConfig) -> None:
        """Gives a slot to a choice that has its pages and is to be prefilled."""
        request = sequence.request
        self.sequences[slot] = sequence
        self.decoding[slot] = False
        self.lengths[slot] = sequence.length
        self.again[slot] = self.unread[slot] = self.ahead[slot] = 0
        self.ends[slot] = len(request.prompt) + request.max_tokens
        self.least_drafts[slot] = request.drafts or 0
        self.most_drafts[slot] = cfg.drafts if request.drafts is None else request.drafts
        self.draft_contexts[slot] = cfg.max_model_len if request.draft_context is None else request.draft_context
        self.draft_counts[slot] = 0
        self.pause_tokens[slot] = -1
        self.last_times[slot] = sequence.last_time
        self.eos[slot] = -1 if request.ignore_eos else cfg.eos_id
        self.masked[slot] = sequence.mask is not None
        self.watched[slot] = (
            bool(request.stop_token_ids) or sequence.mask is not None or sequence.sampling.top_logprobs >= 0
        )
        self.covered[slot] = len(sequence.pages) * cfg.page_size
        self.page_table[slot, : len(sequence.pages)] = sequence.pages

    def keep_drafts(self, rows: Rows, drafts: Int32[np.ndarray, "rows block"]) -> None:
        """Notes what a step has drafted behind its newest token, as far as it may be verified."""
        count = min(drafts.shape[1], self.drafts.shape[1])
        self.drafts[rows, :count] = drafts[:, :count]
        self.draft_counts[rows] = count

    def positions(self, rows: Rows) -> Int32[np.ndarray, " rows"]:
        """The largest position that the next token to run of each choice can have."""
        lengths, again = self.lengths[rows], self.again[rows]
        newest = np.minimum(lengths + self.ahead[rows], self.ends[rows]) - 1
        return np.where(again > 0, lengths - again, newest) if again.any() else newest
