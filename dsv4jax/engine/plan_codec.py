"""Step plans as JSON values, for recordings, and as bytes, for the way to other processes.

Both forms hold a prompt once, where its slot is started; prefills refer to it by their slot.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int32

from dsv4jax.engine.plan import Decodes, Prefill, RankPlan, RunningRequests, SlotMask, SlotStart, Speculation, StepPlan
from dsv4jax.sampling_settings import RequestSampling

Prompts = dict[tuple[int, int], np.ndarray]
"""By rank and slot: the tokens that the slot was started with last."""

_RUNNING = {"decodes": Decodes, "speculation": Speculation}
_HEADER_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8  # bytes; numpy reads aligned arrays in place


def take_prompts(plan: StepPlan, prompts: Prompts) -> None:
    """Brings `prompts` up to date with a plan that is about to be written.

    Raises:
      ValueError: a prefill runs other tokens than its slot was started with, which could not be read back.
    """
    for rank, part in enumerate(plan.ranks):
        prompts.update({(rank, start.slot): start.tokens for start in part.starts})
        for chunk in part.prefills:
            known = prompts.get((rank, chunk.slot), ())
            if known is not chunk.tokens and not np.array_equal(known, chunk.tokens):
                raise ValueError(f"step {plan.number}: slot {chunk.slot} was not started with these tokens")


def plan_to_json(plan: StepPlan, array: Callable[[np.ndarray], Any] | None = None) -> Any:
    """The plan as a JSON value, without the tokens of prefills.

    Args:
      array: writes an array of int32 or uint32. None: lists of numbers, where the last dimension of uint32 is written
        as hexadecimal bytes (little-endian words).
    """
    array = array or _array_to_json

    def fields(value: Any, without: str = "") -> dict[str, Any]:
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.name != without)
        return {name: array(v) if isinstance(v, np.ndarray) else v for name, v in items}

    ranks = []
    for rank in plan.ranks:
        starts = []
        for start in rank.starts:
            plain = {"sampling": dataclasses.asdict(start.sampling), "logit_bias": [*start.logit_bias.items()]}
            starts.append(fields(start) | plain)
        masks = [[m.slot, None if m.mask is None else array(m.mask)] for m in rank.masks]
        prefills = [fields(chunk, without="tokens") for chunk in rank.prefills]
        first_drafts = list(rank.first_drafts)
        ranks.append({"starts": starts, "masks": masks, "prefills": prefills, "first_drafts": first_drafts})

    def running(part: RunningRequests) -> dict[str, Any]:
        return fields(part) | {"page_tables": [[rank, array(table)] for rank, table in part.page_tables.items()]}

    decoding = {name: (part := getattr(plan, name)) and running(part) for name in _RUNNING}
    return {"number": plan.number, "ranks": ranks} | decoding


def plan_from_json(value: Any, prompts: Prompts, array: Callable[[Any], np.ndarray] | None = None) -> StepPlan:
    """The plan that `plan_to_json` wrote; `prompts` are brought up to date.

    Args:
      array: reads what the writer's `array` wrote.
    """
    array = array or _array_from_json
    ranks = []
    for number, rank in enumerate(value["ranks"]):
        starts = tuple(
            SlotStart(
                slot=s["slot"],
                tokens=array(s["tokens"]),
                generated=s["generated"],
                sampling=RequestSampling(**s["sampling"]),
                logit_bias=dict(s["logit_bias"]),
            )
            for s in rank["starts"]
        )
        prompts.update({(number, start.slot): start.tokens for start in starts})
        masks = tuple(SlotMask(slot, None if mask is None else array(mask)) for slot, mask in rank["masks"])
        prefills = tuple(
            Prefill(**p | {"tokens": prompts[number, p["slot"]], "pages": array(p["pages"])}) for p in rank["prefills"]
        )
        ranks.append(RankPlan(starts, masks, prefills, tuple(rank["first_drafts"])))

    def running(kind: type[RunningRequests], part: dict[str, Any]) -> RunningRequests:
        tables = {rank: array(table) for rank, table in part["page_tables"]}
        columns = {name: array(column) for name, column in part.items() if name != "page_tables"}
        return kind(**columns, page_tables=tables)

    decoding = {name: value[name] and running(kind, value[name]) for name, kind in _RUNNING.items()}
    return StepPlan(value["number"], tuple(ranks), **decoding)


class PlanEncoder:
    """Writes the plans of one engine as bytes, in the order of its steps.

    A plan is the length of a JSON header (u64), the header, and the arrays' bytes, to which the header refers as
    [place, type, *shape]. Everything is little-endian. Of page tables only what has changed is there.
    """

    def __init__(self):
        self._prompts: Prompts = {}
        self._tables: dict[int, _PageTables] = {}

    def encode(self, plan: StepPlan) -> bytes:
        """The plan's bytes.

        Raises:
          ValueError: see `take_prompts`.
        """
        take_prompts(plan, self._prompts)
        arrays: list[np.ndarray] = []
        place = 0

        def array(values: np.ndarray) -> list[Any]:
            nonlocal place
            kind = "<u4" if values.dtype == np.uint32 else "<i4"
            values = np.ascontiguousarray(values, kind)
            arrays.append(values)
            place += values.nbytes
            return [place - values.nbytes, kind, *values.shape]

        plan = _with_page_tables(plan, self._tables, _PageTables.changes)
        header = json.dumps(plan_to_json(plan, array), separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        return b"".join([_HEADER_LENGTH.pack(len(header)), header, *arrays])


class PlanDecoder:
    """Reads what a `PlanEncoder` wrote, all of it and in the same order."""

    def __init__(self):
        self._prompts: Prompts = {}
        self._tables: dict[int, _PageTables] = {}

    def decode(self, content: bytes) -> StepPlan:
        """The plan; its arrays may be read-only views of `content`.

        Raises:
          ValueError, KeyError: not the bytes of a plan, or an earlier plan is missing.
        """
        (length,) = _HEADER_LENGTH.unpack_from(content)
        first = _HEADER_LENGTH.size + length

        def array(reference: list[Any]) -> np.ndarray:
            place, kind, *shape = reference
            return np.frombuffer(content, kind, math.prod(shape), first + place).reshape(shape)

        plan = plan_from_json(json.loads(content[_HEADER_LENGTH.size : first]), self._prompts, array)
        return _with_page_tables(plan, self._tables, _PageTables.take)


class _PageTables:
    """The page tables of one rank's slots as both ends know them."""

    def __init__(self):
        self._known = np.zeros((0, 0), np.int32)

    def changes(
        self, slots: Int32[np.ndarray, " requests"], table: Int32[np.ndarray, "requests pages"]
    ) -> Int32[np.ndarray, "3 changes"]:
        """Columns of (request, page's place, page), behind a first one that begins with the width of the table."""
        width = table.shape[1]
        self._reach(slots, width)
        rows, places = np.nonzero(self._known[slots, :width] != table)
        self._known[slots[rows], places] = table[rows, places]
        return np.concatenate([[[width], [0], [0]], [rows, places, table[rows, places]]], axis=1, dtype=np.int32)

    def take(
        self, slots: Int32[np.ndarray, " requests"], changes: Int32[np.ndarray, "3 changes"]
    ) -> Int32[np.ndarray, "requests pages"]:
        """The table with the changes made."""
        width = int(changes[0, 0])
        self._reach(slots, width)
        rows, places, pages = changes[:, 1:]
        self._known[slots[rows], places] = pages
        return self._known[slots, :width]

    def _reach(self, slots: Int32[np.ndarray, " requests"], width: int) -> None:
        have = self._known.shape
        missing = max(0, int(slots.max(initial=-1)) + 1 - have[0]), max(0, width - have[1])
        if any(missing):
            self._known = np.pad(self._known, [(0, missing[0]), (0, missing[1])])


def _with_page_tables(
    plan: StepPlan, tables: dict[int, _PageTables], change: Callable[[_PageTables, np.ndarray, np.ndarray], np.ndarray]
) -> StepPlan:
    """The plan with each rank's page table replaced by `change` of it."""
    for name in _RUNNING:
        if (part := getattr(plan, name)) is not None:
            changed = {
                rank: change(tables.setdefault(rank, _PageTables()), part.of_rank(rank).slots, table)
                for rank, table in part.page_tables.items()
            }
            plan = dataclasses.replace(plan, **{name: dataclasses.replace(part, page_tables=changed)})
    return plan


def _array_to_json(values: np.ndarray) -> Any:
    if values.dtype != np.uint32:
        return values.tolist()
    return values.astype("<u4").tobytes().hex() if values.ndim == 1 else [*map(_array_to_json, values)]


def _array_from_json(value: Any) -> np.ndarray:
    if isinstance(value, str):
        return np.frombuffer(bytes.fromhex(value), "<u4")
    if value and isinstance(value[0], str):
        return np.stack([*map(_array_from_json, value)])
    return np.array(value, np.int32)
