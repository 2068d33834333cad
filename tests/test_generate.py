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

from dsv4jax.generate import Generator
from dsv4jax.numerics import REFERENCE
from dsv4jax.sampling_settings import RequestSampling

SCRIPT = Path(__file__).parent.parent / "scripts" / "generate.py"
PROMPTS = [np.arange(5, 47, dtype=np.int32), np.arange(100, 109, dtype=np.int32)]


def generate(prompts, **kwargs) -> list[list[int]]:
    model = drafting_model()
    generator = Generator(model.params, model.cfg, prompts, **({"max_tokens": 12, "chunk": 32} | kwargs))
    out = [[] for _ in prompts]
    for request, token, logprob in generator.run():
        assert logprob <= 0
        out[request].append(token)
    timing = generator.timing
    assert timing.prefill_tokens == sum(map(len, prompts))
    assert timing.decode_tokens == sum(len(ids) - 1 for ids in out)
    assert timing.compile_seconds > 0
    return out


def test_greedy_generation_equals_steps_by_hand():
    """A prompt longer than a chunk beside a short one, each as if it were alone."""
    model = drafting_model()
    server = Server(model.cfg, model.params, REFERENCE, prefill=SMALL_PREFILL, decode=SMALL_DECODE)
    expected = []
    for slot, prompt in enumerate(PROMPTS):
        request = Request(prompt, slot, list(range(16 * slot, 16 * slot + 16)))
        server.start(request)
        ids = [int(server.prefill((request, 0, len(prompt))).tokens[0, 0])]
        while len(ids) < 12:
            ids.append(int(server.decode((request, len(prompt) + len(ids) - 1, ids[-1:])).tokens[0, 0]))
        expected.append(ids)
    assert generate(PROMPTS, sampling=RequestSampling(temperature=0.0)) == expected
    # A stop id ends its request, and only that.
    stop = expected[0][4]
    assert stop not in expected[0][:4] + expected[1]
    assert generate(PROMPTS, sampling=RequestSampling(temperature=0.0), stop_ids=[stop]) == [
        expected[0][:5],
        expected[1],
    ]


def test_seeds_and_usable_ids():
    seeded = RequestSampling(temperature=1.0, seed=3)
    first, second = generate([PROMPTS[1], PROMPTS[1]], sampling=seeded, usable_ids=40)
    assert first != second  # seed and seed + 1
    assert max(first + second) < 40
    alone = generate([PROMPTS[1]], sampling=seeded, usable_ids=40)
    assert alone == [first]


@pytest.mark.parametrize(
    ("prompts", "change", "message"),
    [
        ([], {}, "prompts: at least one"),
        ([PROMPTS[0], PROMPTS[0][:0]], {}, "prompt 1 is empty"),
        ([np.zeros(1 << 20, np.int32)], {}, r"prompt 0 has 1048576 tokens.*context of 1048576"),
        ([PROMPTS[0]], {"max_tokens": 0}, "max_tokens = 0"),
        ([np.array([1, 512], np.int32)], {}, r"token id 512 is not in 0\.\.511"),
        ([PROMPTS[0], np.append(PROMPTS[0], 600)], {"chunk": 32}, "prompt 1: token id 600"),
        ([PROMPTS[0]], {"chunk": 20}, "chunk = 20: must be a positive multiple of 16"),
        ([PROMPTS[0]], {"usable_ids": 0}, "usable_ids = 0"),
    ],
)
def test_bad_requests_are_refused(prompts, change, message):
    model = drafting_model()
    with pytest.raises(ValueError, match=message):
        Generator(model.params, model.cfg, prompts, **({"max_tokens": 4} | change))


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
    assert re.search(r"prefill \d+ tokens in .* s \(.* tokens/s\), decode 15 tokens in .*; 3 prompts", run.stderr)
    assert re.search(r"first token .* s after start of loading: loading .* s, compiling .* s", run.stderr)


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
