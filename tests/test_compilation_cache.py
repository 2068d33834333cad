"""Programs that a process has compiled are found by the next one, and do the same; damaged ones are compiled again."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
from checkpoint_files import run_python
from exported_model import CFG, shape

from dsv4jax.batch import DecodeBucket
from dsv4jax.checkpoint.random import random_params
from dsv4jax.compilation_cache import use_compilation_cache
from dsv4jax.engine.programs import Buckets, Programs
from dsv4jax.export import program_digests

RUN = "import sys, test_compilation_cache; test_compilation_cache.main(*sys.argv[1:])"
DAMAGES = (
    lambda content: b"",
    lambda content: content[: len(content) // 2],
    lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
    lambda content: bytes(len(content)),
)


def digests():
    """What the programs of an engine give; each must take the cache that it is given."""
    made = shape()
    cache_cfg = dataclasses.replace(made.cache, drafts=None)
    buckets = Buckets(prefill=(), decode=(DecodeBucket(2, 6),), masks=(1,))
    programs = Programs(CFG, cache_cfg, buckets, made.numerics, made.layout, progress=False)
    return program_digests(programs, random_params(CFG, 3, made.layout))


def main(directory, results, damages):
    """In a process of its own: programs asked for and found, and what they give; and again when entries are damaged."""
    counts, seen = use_compilation_cache(directory), []
    for damage in (False, True)[: 1 + int(damages)]:
        if damage:
            entries = sorted(Path(directory).glob("*-cache"), key=lambda entry: entry.stat().st_size)
            for i, entry in enumerate(entries[:-1]):  # all but the step, which takes long to compile
                entry.write_bytes(DAMAGES[i % len(DAMAGES)](entry.read_bytes()))
            jax.clear_caches()
        counts.asked = counts.found = 0
        given = digests()
        seen.append([counts.asked, counts.found, given])
    Path(results).write_text(json.dumps(seen))


@pytest.mark.timeout(300)
def test_the_next_process_compiles_nothing_and_gives_the_same_and_damaged_entries_are_compiled_again(tmp_path):
    for damages in (0, 1):
        run_python(RUN, tmp_path / "cache", tmp_path / f"{damages}", damages)
    ((asked, found, given),) = json.loads((tmp_path / "0").read_text())
    assert asked > len(DAMAGES) and found == 0
    warm, damaged = json.loads((tmp_path / "1").read_text())
    assert warm == [asked, asked, given]
    assert damaged == [asked, 1, given]
