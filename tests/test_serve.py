"""scripts/serve.py as a user runs it: start, answer, drain, and refusals in one line."""

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dsv4jax
from dsv4jax.cache import CacheConfig
from dsv4jax.config import ModelConfig
from dsv4jax.engine.memory_plan import memory_plan
from dsv4jax.numerics import REFERENCE

SERVE = [sys.executable, str(Path(__file__).parent.parent / "scripts" / "serve.py"), "--port=0"]


@pytest.fixture(scope="module")
def server(two_layers):
    """Two layers on two ranks with the fewest programs; (address, process, what it printed)."""
    flags = [
        f"--model={two_layers}",
        "--max_model_len=512",
        "--contexts=512",
        "--prefill_tokens=64",
        "--slots=4",
        "--ranks=2",
        "--strict",
        "--dev",
        "--deterministic",
    ]
    process = subprocess.Popen([*SERVE, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    address = loading = None
    for line in process.stderr:
        log.append(line)
        if found := re.search(r"starting: answering 503 on ([\d.]+:\d+)", line):
            loading = f"http://{found[1]}"
            assert_loading(loading)
        if found := re.search(r"listening on ([\d.]+:\d+)", line):
            address = f"http://{found[1]}"
            break
    assert address and loading == address, "".join(log)
    reading = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)
    reading.start()
    yield address, process, log
    process.kill()


def assert_loading(address):
    for path in ("/health", "/ready", "/v1/models"):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            call(address, path)
        assert refusal.value.code == 503 and refusal.value.headers["Retry-After"] == "5"
        assert json.load(refusal.value)["error"]["code"] == "loading"


def call(address, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def caught_running(address, ask):
    """The future of a request that was seen to run; asked again where it ended too quickly to be seen."""
    while True:
        running = ask()
        while not running.done():
            if json.loads(call(address, "/status.json"))["stats"]["running"]:
                return running


def chat(address, **fields):
    fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0, **fields}
    return json.loads(call(address, "/v1/chat/completions", fields))


@pytest.mark.timeout(600)
def test_it_is_ready_once_it_listens(server):
    address, _, _ = server
    assert call(address, "/health") == b""
    call(address, "/ready")
    answer = chat(address)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_same_request_gives_the_same_answer_alone_and_among_others(server):
    address, _, _ = server
    alone = chat(address, logprobs=True)["choices"]
    with ThreadPoolExecutor(6) as pool:
        texts = ["Hi", "Tell me more about pages. " * 8, "Hi", "windows", "Hi", "Tell me more about pages. " * 9]
        answers = list(
            pool.map(lambda t: chat(address, messages=[{"role": "user", "content": t}], logprobs=True), texts)
        )
    for text, answer in zip(texts, answers, strict=True):
        if text == "Hi":
            assert answer["choices"] == alone


def test_a_repeated_prompt_is_answered_from_the_prefix_cache_in_usage_and_metrics(server):
    address, _, _ = server
    call(address, "/reset_prefix_cache", {})
    prompt = [3 + i * 7 % 700 for i in range(450)]
    first, second = (
        json.loads(call(address, "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0}))
        for _ in range(2)
    )
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    metrics = call(address, "/metrics").decode()
    hits = float(re.search(r"^vllm:prefix_cache_hits_total{.*} (\S+)$", metrics, re.M)[1])
    # Seven full pages are found; exact replay goes back one window in each layer, and to where a tile begins.
    assert cached == hits == (7 * 64 - 2 * 31) // 16 * 16


def test_structured_output_and_tools_hold_on_the_device(server):
    address, _, _ = server
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = chat(
        address,
        max_tokens=200,
        temperature=1,
        seed=3,
        thinking={"type": "disabled"},
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )["choices"][0]
    written = re.sub(r"\s", "", answer["message"]["content"])
    whole = ['{"a":"x"}', '{"a":"y"}']
    assert written and any(text.startswith(written) for text in whole)
    assert (answer["finish_reason"] == "stop") == (written in whole)
    choice = chat(
        address, max_tokens=40, structured_outputs={"choice": ["red", "green"]}, thinking={"type": "disabled"}
    )["choices"][0]
    assert choice["message"]["content"] in ("red", "green")
    assert choice["finish_reason"] == "stop"
    budget = chat(address, max_tokens=30, ignore_eos=True, thinking_token_budget=3, temperature=1, seed=5)
    assert budget["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 3


def test_prompt_log_probabilities_for_scoring(server):
    address, _, _ = server
    body = {"prompt": "Hi there, you", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    logprobs = json.loads(call(address, "/v1/completions", body))["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])


def test_nothing_was_compiled_while_serving_and_sigterm_drains(server):
    address, process, log = server
    metrics = call(address, "/metrics").decode()
    assert re.search(r"^vllm:spec_decode_num_drafts_total{.*} [1-9]", metrics, re.M)
    assert re.search(r"^dsv4jax:compilations_total{.*} 0.0$", metrics, re.M)
    with ThreadPoolExecutor(1) as pool:
        running = caught_running(address, lambda: pool.submit(chat, address, max_tokens=40, ignore_eos=True))
        process.send_signal(signal.SIGTERM)
        assert running.result(120)["usage"]["completion_tokens"] == 40
    assert process.wait(60) == 0
    printed = process.stdout.read()
    assert re.search(
        r"weights .*MiB.*\n.*tables.*\n.*pages.*\n.*windows.*\n.*sampling.*\n.*workspace.*MiB\n.*total", printed
    )
    text = "".join(log)
    assert re.search(r"POST /v1/chat/completions 200 prompt=\d+ cached=\d+ output=\d+ ttft=[\d.]+ total=[\d.]+", text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pages=1000000000"], "not enough memory: the memory plan needs"),
        (["--model=/nowhere"], "/nowhere"),
        (["--api_key="], "a key must be printable ASCII and not empty"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_loading(flags, message):
    run = subprocess.run([*SERVE, *flags], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], run.stderr
    assert "Traceback" not in run.stderr and "loading" not in run.stderr


# Starts as often as it is told, up to the first compilation: flags and free memory in, the error or the pages out.
UP_TO_COMPILING = """
import json, sys
from absl import flags
from absl.testing import flagsaver
from dsv4jax.engine import memory_plan
sys.path.insert(0, sys.argv[1])
import serve

class Compiling(Exception):
    pass

def compiling(cfg, cache_cfg, *_, **__):
    raise Compiling(cache_cfg.pages)

def free_memory(_=None):
    return free

serve.Programs = compiling
memory_plan.available_device_memory = memory_plan.available_host_memory = free_memory
for arguments, free in json.loads(sys.argv[2]):
    with flagsaver.flagsaver():
        flags.FLAGS(["serve", "--port=0", *arguments])
        try:
            serve._run()
        except ValueError as error:
            print(json.dumps(str(error)))
        except Compiling as pages:
            print(json.dumps(int(str(pages))))
"""


def up_to_compiling(*cases):
    run = subprocess.run(
        [sys.executable, "-c", UP_TO_COMPILING, str(Path(SERVE[1]).parent), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_flags_that_contradict_each_other_are_refused_before_anything_is_compiled():
    two = "--processes=2", "--ranks=2", "--pages=999"
    refusals = {
        # First those with ranks, which are told to JAX before it starts.
        two: "--coordinator=None: must be HOST:PORT with a port from 1 to 65534",
        (*two, "--preset=latency"): "--preset=latency: needs --processes=1, not 2",
        (*two, "--coordinator=host"): "--coordinator=host: must be HOST:PORT",
        (*two, "--coordinator=a:65535"): "--coordinator=a:65535: must be HOST:PORT",
        (*two, "--coordinator=a:1"): "DSV4JAX_CLUSTER_TOKEN: must hold a secret",
        ("--prefill_every=2", "--decode_every=2"): "prefill_every = 2 and decode_every = 2: one of them must be 1",
        (
            "--drafts=2",
            "--engram=host",
        ): "--drafts=2: must be 0 with --engram=host",
        ("--drafts=0", "--draft_expert_slots=9"): "--draft_expert_slots=9: no drafts are made",
        ("--preset=latency", "--expert_slots=16"): "--expert_slots=16: must not be given with --preset=latency",
        ("--preset=latency", "--implementation=pallas"): "--implementation=pallas: the kernels take all heads",
        ("--expert_slots=1",): "--expert_slots=1: 1 ranks of 1 expert slots",
        ("--draft_expert_slots=1",): "--draft_expert_slots=1: 1 ranks of 1 expert slots",
        ("--pages=63",): "--pages=63: 4032 tokens are fewer than --max_model_len=4096",
        ("--max_model_len=20000",): "--max_model_len=20000: the model's context is 16384",
        ("--contexts=64,9000",): "--contexts: 9000 is beyond --max_model_len=4096",
        ("--contexts=a",): "--contexts=a: must be whole numbers",
        ("--drafts=6",): "--drafts=6: the checkpoint's draft makes at most 5",
        ("--drafts=4", "--fewer_drafts=1,4"): "--fewer_drafts: 4 must be below --drafts=4",
        ("--decode_requests=99",): "--decode_requests: 99 is beyond --slots=16",
        ("--prefill_tokens=32",): "prefill_tokens = 32: must hold prefill_requests = 4 tiles of 16",
        ("--prefill_tokens=256", "--prefill_requests=17"): "prefill_tokens = 256: must hold prefill_requests = 17",
        ("--prefill_tokens=100",): "tokens = 100: must be a multiple of tile = 16",
        ("--prefill_tokens=",): "--prefill_tokens=: must be whole numbers of at least 1",
        ("--contexts=",): "--contexts=: must be whole numbers of at least 1",
        ("--decode_requests=",): "--decode_requests=: must be whole numbers of at least 1",
        ("--decode_requests=0",): "--decode_requests=0: must be whole numbers of at least 1",
        ("--page_size=63",): "page_size = 63: must be a multiple of 2",
        ("--implementation=pallas",): 'implementation = "pallas": the device is cpu: must be a Hopper GPU',
        ("--process=1",): "--coordinator, --process: need --processes above 1",
        ("--coordinator=a:1",): "--coordinator, --process: need --processes above 1",
        ("--processes=2",): "--pages: must be given with several processes",
        ("--processes=2", "--pages=999"): "--ranks=1: must be a multiple of --processes=2",
    }
    seen = up_to_compiling(*((flags, None) for flags in refusals))
    for message, error in zip(refusals.values(), seen, strict=True):
        assert isinstance(error, str) and message in error


def test_the_cache_takes_what_memory_holds_but_a_full_request_at_least():
    cfg = ModelConfig.from_checkpoint(Path(dsv4jax.__file__).parent / "default_model")
    plan = memory_plan(cfg, CacheConfig(slots=8, pages=1, page_size=64, drafts="shared"), REFERENCE)
    spare = 1 << 30  # for the workspace, on the CPU

    def free(pages):
        return int((plan.total - plan.pages + spare + pages * plan.pages) / plan.fraction) + 2

    flags = ["--slots=8", "--max_model_len=1024"]  # 16 pages per slot
    memory = {None: 8 * 16, free(1000): 2 * 8 * 16, free(40): 40, free(16): 16, free(5): 16, free(0): 16, 1 << 29: 16}
    assert up_to_compiling(*((flags, bytes_) for bytes_ in memory)) == list(memory.values())
    (refusal,) = up_to_compiling((flags, plan.total))
    assert "not enough memory: the memory plan needs" in refusal
