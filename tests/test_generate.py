"""Generation: the library loop on a small model, and the command as a user calls it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden import drafting_model
from serving import SMALL_DECODE, SMALL_PREFILL, Request, Server

from dsv4jax.engine.generating import EngineGenerator, generation_shape
from dsv4jax.engine.programs import Programs
from dsv4jax.numerics import REFERENCE
from dsv4jax.sampling_settings import RequestSampling

SCRIPT = Path(__file__).parent.parent / "scripts" / "generate.py"
GREEDY = RequestSampling(temperature=0.0)
PROMPTS = [np.arange(5, 47, dtype=np.int32), np.arange(100, 109, dtype=np.int32)]


def generate(prompts, *, sampling=GREEDY, eos_id=-1, usable_ids=None, **sizes) -> list[list[int]]:
    model = drafting_model()
    sizes = {"max_tokens": 12, "chunk": 32, "numerics": REFERENCE} | sizes
    shape = generation_shape(model.cfg, prompts, **sizes)
    programs = Programs(model.cfg, shape.cache, shape.buckets, shape.numerics, params=model.params, progress=False)
    generator = EngineGenerator(
        shape,
        programs,
        model.params,
        prompts,
        max_tokens=sizes["max_tokens"],
        sampling=sampling,
        eos_id=eos_id,
        usable_ids=usable_ids,
    )
    out, ended = [[] for _ in prompts], [False] * len(prompts)
    for request, tokens, ends in generator.run():
        assert tokens and not ended[request]
        out[request] += tokens
        ended[request] = ends
    assert all(ended)
    assert generator.prefill_tokens >= sum(map(len, prompts)) and generator.prefill_seconds > 0
    assert 0 < generator.decode_tokens < sum(map(len, out)) and generator.decode_seconds > 0
    assert (generator.drafts.rounds > 0) == (shape.drafts > 0) and not any(generator.drafts.withheld.values())
    return out


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """By calling the steps by hand, each prompt alone."""
    model = drafting_model()
    server = Server(model.cfg, model.params, REFERENCE, prefill=SMALL_PREFILL, decode=SMALL_DECODE)
    tokens = []
    for slot, prompt in enumerate(PROMPTS):
        request = Request(prompt, slot, list(range(16 * slot, 16 * slot + 16)))
        server.start(request)
        ids = [int(server.prefill((request, 0, len(prompt))).tokens[0, 0])]
        while len(ids) < 12:
            ids.append(int(server.decode((request, len(prompt) + len(ids) - 1, ids[-1:])).tokens[0, 0]))
        tokens.append(ids)
    return tokens


@pytest.mark.parametrize(("drafts", "replay"), [(0, "bounded"), (3, "exact"), (3, "bounded")])
def test_greedy_generation_equals_steps_by_hand(expected, drafts, replay):
    """A prompt longer than a chunk beside a short one; short enough for bounded replay to be exact."""
    assert generate(PROMPTS, drafts=drafts, replay=replay) == expected


@pytest.mark.parametrize("drafts", [0, 4])
def test_the_end_of_a_sequence_ends_its_request_and_only_that(expected, drafts):
    """Tokens that the same step accepted behind it are dropped."""
    end = expected[0][4]
    assert end not in expected[0][:4] + expected[1]
    assert generate(PROMPTS, eos_id=end, drafts=drafts) == [expected[0][:5], expected[1]]


def test_seeds_and_usable_ids():
    seeded = RequestSampling(temperature=1.0, seed=2**63 - 1)
    options = {"sampling": seeded, "usable_ids": 40, "drafts": 2}
    first, second = generate([PROMPTS[1], PROMPTS[1]], **options)
    assert first != second  # seed and seed + 1, which wraps
    assert max(first + second) < 40
    assert generate([PROMPTS[1]], **options) == [first]


def test_as_few_programs_as_will_do():
    cfg = drafting_model().cfg

    def steps(**sizes):
        shape = generation_shape(cfg, PROMPTS, max_tokens=4, numerics=REFERENCE, **sizes)
        return {name: len(getattr(shape.buckets, name)) for name in ("prefill", "decode", "verify", "draft", "masks")}

    none = {"prefill": 0, "decode": 0, "verify": 0, "draft": 0, "masks": 0}
    assert steps() == none | {"prefill": 1, "decode": 1}
    assert steps(drafts=4) == none | {"prefill": 1, "verify": 1, "draft": 1}


@pytest.mark.parametrize(
    ("prompts", "change", "message"),
    [
        ([], {}, "prompts: at least one"),
        ([PROMPTS[0], PROMPTS[0][:0]], {}, "prompt 1 is empty"),
        ([np.zeros(1 << 20, np.int32)], {}, r"prompt 0 has 1048576 tokens.*context of 1048576"),
        ([PROMPTS[0]], {"max_tokens": 0}, "max_tokens = 0"),
        ([PROMPTS[0], np.append(PROMPTS[0], 600)], {}, r"prompt 1: token id 600 is not in 0\.\.511"),
        ([PROMPTS[0]], {"drafts": 5}, r"drafts = 5: must be in 0\.\.4"),
        ([PROMPTS[0]], {"chunk": 20}, "chunk = 20: must be a positive multiple of 16"),
    ],
)
def test_bad_requests_are_refused(prompts, change, message):
    sizes = {"max_tokens": 4, "numerics": REFERENCE} | change
    with pytest.raises(ValueError, match=message):
        generation_shape(drafting_model().cfg, prompts, **sizes)


def command(*arguments: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=500, **kwargs)


def test_the_command_writes_completions_and_replies_of_one_batch(tmp_path):
    conversation = tmp_path / "conversation.json"
    conversation.write_text(json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]))
    run = command(
        "--prompt=Once upon", "--chat=hello", f"--messages={conversation}", "--max_tokens=6", "--seed=1",
        "--engram=host", "--replay=bounded",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    titles = re.findall(r"^--- (.*)$", run.stdout, re.M)
    assert titles == ["'Once upon'", "'hello'", "'Hi'"]
    assert run.stdout.count("[reasoning]") == 2
    assert re.search(
        r"prefill \d+ tokens in .* s \(.* tokens/s\), decode \d+ tokens in .*; 3 prompts, no d", run.stderr
    )
    assert re.search(
        r"first token .* s after the start: weights .* s, programs .* s; reference num.*, ref.*bounded", run.stderr
    )


def test_the_command_drafts_by_default():
    run = command("--prompt=Once upon", "--max_tokens=6", "--seed=1")
    assert run.returncode == 0, run.stderr
    assert re.search(r"1 prompts, \d+ of \d+ drafts accepted, \d\.\d\d tokens a verification", run.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to do"),
        (["--prompt=x", "--numerics=fp64"], "value should be one of <reference|fast>"),
        (["--prompt=x", "--max_tokens=many"], "max_tokens"),
        (["--prompt=x", "stray"], "unexpected arguments: ['stray']"),
    ],
)
def test_the_command_refuses_bad_input_clearly(arguments, message):
    run = command(*arguments)
    assert run.returncode != 0
    assert message in run.stderr + run.stdout
    assert "Traceback" not in run.stderr


# Calls the command as often as it is told, in one process; prints what it ends with.
ENDS = """
import json, sys
from absl import flags
from absl.testing import flagsaver
sys.path.insert(0, sys.argv[1])
import command_line, generate

for arguments in json.loads(sys.argv[2]):
    with flagsaver.flagsaver():
        flags.FLAGS(["generate", *arguments])
        try:
            command_line.call(generate.main, "", ["generate"])
        except SystemExit as end:
            print(json.dumps(end.code))
"""


def test_what_cannot_be_generated_is_refused_in_one_line():
    refusals = {
        ("--prompt=x", "--model=/no/such/checkpoint"): "no config.json in '/no/such/checkpoint'",
        ("--prompt=x", "--max_tokens=20000"): "exceeds the model's context of 16384 tokens",
        ("--prompt=",): "prompt 0 is empty",
        ("--prompt=x", "--top_p=0"): "top_p must be a number above 0",
        ("--messages=/no/such/file",): "--messages=/no/such/file",
        ("--prompt=x", "--drafts=6"): "--drafts=6: the checkpoint's draft makes at most 5",
        ("--prompt=x", "--drafts=2", "--engram=host"): "--drafts=2: must be 0 with --engram=host",
        ("--prompt=x", "--implementation=pallas"): 'error: implementation = "pallas": the device is cpu',
    }
    run = subprocess.run(
        [sys.executable, "-c", ENDS, str(SCRIPT.parent), json.dumps([*refusals])],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    ends = [json.loads(line) for line in run.stdout.splitlines()]
    for message, end in zip(refusals.values(), ends, strict=True):
        assert end.startswith("error: ") and message in end
