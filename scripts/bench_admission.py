"""What it costs the host to admit requests by stage, and what running requests notice of bursts and long prompts.

    python scripts/bench_admission.py --report out
    python scripts/bench_admission.py --sections bursts --executor model --running 4 --burst 8 --prompt_tokens 200 \\
        --slots 12 --max_model_len 1024 --prefill_tokens 256 --seconds 30 --every 10 --report out

`docs/bench/admission.md` says what each section isolates. Stages and the long prompt need no device; bursts run on the
simulated executor or on a model.
"""

import importlib.resources
from pathlib import Path

import command_line
from absl import flags
from bench_system import MAX_MODEL_LEN, RANKS, SEED, SLOTS, make_system, system_ceiling, system_conditions

from dsv4jax.bench.engines.admission import BurstLoad, admission_stages, beside_long_prompt, run_bursts
from dsv4jax.bench.engines.system import System
from dsv4jax.bench.results.page import reported
from dsv4jax.bench.results.plots import Axis, Plot
from dsv4jax.bench.results.result import Result, text_table
from dsv4jax.bench.traffic.counting import Window
from dsv4jax.tokenizer import Tokenizer

_SECTIONS = flags.DEFINE_multi_enum(
    "sections",
    ["stages", "bursts", "long_prompt"],
    ["stages", "bursts", "long_prompt"],
    "What to measure; may be repeated.",
)
_TOKENS = flags.DEFINE_multi_integer(
    "tokens", [1_000, 10_000, 100_000, 1_000_000], "Prompts of section stages.", lower_bound=1
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Times that each stage is measured.", 1)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "A tokenizer.json. Default: that of the embedded model.")
_CAPS = flags.DEFINE_multi_integer("max_admissions", [1, 2, 8, 32], "Requests started in a step, at most; bursts.", 1)
_RUNNING = flags.DEFINE_integer("running", 16, "Requests that run all the time; bursts.", 1)
_RUNNING_TOKENS = flags.DEFINE_integer("running_tokens", 500, "Tokens of their prompts.", 1)
_BURST = flags.DEFINE_integer("burst", 32, "Requests of a burst.", 1)
_PROMPT = flags.DEFINE_integer("prompt_tokens", 4000, "Tokens of their prompts.", 1)
_OUTPUT = flags.DEFINE_integer("output_tokens", 16, "Tokens that they generate.", 1)
_EVERY = flags.DEFINE_float("every", 10.0, "Seconds from one burst to the next; the first comes after as many.", 0.1)
_SECONDS = flags.DEFINE_float("seconds", 50.0, "Seconds of a run with bursts, on the executor's clock.", 0.2)
_LONG = flags.DEFINE_integer("long_prompt", 855_000, "Tokens of the long prompt.", 1)
_CHATS = flags.DEFINE_integer("chats", 32, "Chats beside it.", 1)
_REPORT = command_line.report_flag()
flags.set_default(SLOTS, 64)

# prefill_tokens, prefill_every, decode_every
_SHARES = ((512, 1, 1), (2048, 1, 1), (8192, 1, 1), (2048, 4, 1), (2048, 1, 4))
_TEXT = (
    "A request comes as bytes, becomes text, becomes numbers, and waits until a slot and enough pages are free. What"
    " takes long here is felt by everybody: by the one who waits for a first token, and by those whose next token is"
    " late because the same processor was busy.\n"
)
_KEYS = {
    "stages": ("tokens",),
    "bursts": ("max_admissions",),
    "long_prompt": ("prefill_tokens", "prefill_every", "decode_every"),
}
_PLOTS = [
    Plot(
        "line",
        "Host time of a prompt by stage",
        "stages",
        "tokens",
        ("parse_ms", "tokenise_ms", "hash_ms", "enqueue_ms", "first_plan_ms", "list_based_ms"),
        Axis("tokens of the prompt", log=True),
        Axis("host time", "ms", log=True),
    ),
    Plot(
        "line",
        "Running and new requests by the cap on admissions",
        "bursts",
        "max_admissions",
        ("running_inter_token_p99_ms", "new_ttft_p50_ms", "new_queue_p50_ms"),
        Axis("requests started in a step, at most", log=True),
        Axis("time", "ms", log=True),
    ),
]


def run_stages(result: Result) -> None:
    """Every stage for every length."""
    default = importlib.resources.files("dsv4jax") / "default_model/tokenizer.json"
    tokenizer = Tokenizer.from_file(Path(_TOKENIZER.value or str(default)))
    for tokens in _TOKENS.value:
        for row in admission_stages(tokens, tokenizer, _TEXT, _REPEATS.value):
            result.add_row("stages", row)
    longest = [row for row in result.rows["stages"] if row["tokens"] == max(_TOKENS.value)]
    best = {name: min(row[name] for row in longest) for name in longest[0]}
    parts = {"parsing ids": best["parse_ms"], "hashing": best["hash_ms"], "the first plan": best["first_plan_ms"]}
    largest = max(parts, key=parts.get)
    result.verdicts.append(
        f"a prompt of {best['tokens']:,} ids costs the host {best['parse_ms'] + best['engine_ms']:.2f} ms, most of it"
        f" {largest}; as text {best['tokenise_ms']:.0f} ms more; lists in the engine cost"
        f" {best['list_based_ms'] / best['engine_ms']:.1f} times as much as arrays"
    )


def run_caps(result: Result, system: System, load: BurstLoad) -> None:
    """Bursts with every cap."""
    window = Window(_EVERY.value, _SECONDS.value)
    for cap in _CAPS.value:
        row, requests, interrupted = run_bursts(system, load, window, cap)
        result.add_requests([{"max_admissions": cap, **m.without_chunks()} for m in requests])
        if interrupted:
            raise KeyboardInterrupt
        result.add_row("bursts", row)
        if row["invalid"]:
            result.verdicts.append(f"invalid, {cap} admissions in a step: {row['invalid']}")
    rows = [row for row in result.rows["bursts"] if row["new_ttft_p50_ms"] is not None]
    if rows:
        calm, quick = (min(rows, key=lambda r: r[name]) for name in ("running_inter_token_p99_ms", "new_ttft_p50_ms"))
        result.verdicts += [
            f"running requests fare best with {calm['max_admissions']} admissions in a step: inter-token p99"
            f" {calm['running_inter_token_p99_ms']:.1f} ms, alone {calm['running_alone_inter_token_p99_ms']:.1f} ms",
            f"new requests fare best with {quick['max_admissions']}: first token {quick['new_ttft_p50_ms']:.0f} ms in"
            f" the median, of which {quick['new_queue_p50_ms']:.0f} ms in the queue",
        ]


def main() -> None:
    if _SECONDS.value <= _EVERY.value:
        raise ValueError(f"--seconds={_SECONDS.value}: must be more than --every={_EVERY.value}")
    sections = _SECTIONS.value
    load = BurstLoad(
        running=_RUNNING.value,
        running_tokens=_RUNNING_TOKENS.value,
        burst=_BURST.value,
        prompt_tokens=_PROMPT.value,
        output_tokens=_OUTPUT.value,
        begin=_EVERY.value,
        every=_EVERY.value,
        seed=SEED.value,
    )
    if "bursts" in sections:
        load.check(SLOTS.value * RANKS.value, MAX_MODEL_LEN.value)
    system = make_system()
    control = {
        "stages": "list_based: an engine that keeps prompts as lists",
        "bursts": "running_alone: the same requests before the first burst",
        "long_prompt": "inter_token_alone: the same chats before the long prompt",
    }
    control = {section: control[section] for section in sections}
    plots = [plot for plot in _PLOTS if plot.table in sections]
    given, ceiling = system_conditions(system, globals()), system_ceiling()
    made = Result("admission", given, keys=_KEYS, control=control, ceiling=ceiling, plots=plots)
    with reported(_REPORT.value, made) as result:
        if "stages" in sections:
            run_stages(result)
        if "bursts" in sections:
            run_caps(result, system, load)
        if "long_prompt" in sections:
            for share in _SHARES:
                result.add_row("long_prompt", beside_long_prompt(_LONG.value, _CHATS.value, *share))
    for name, rows in result.rows.items():
        shown = [{column: row[column] for column in _SHOWN.get(name, row)} for row in rows]
        print(f"\n{name}\n{text_table(shown)}")
    print("", *result.verdicts, sep="\n")


_SHOWN = {
    "bursts": (
        "max_admissions", "running_alone_inter_token_p50_ms", "running_inter_token_p50_ms",
        "running_inter_token_p99_ms", "new_ttft_p50_ms", "new_ttft_max_ms", "new_queue_p50_ms", "new_requests",
    ),
}  # fmt: skip


if __name__ == "__main__":
    command_line.run(main)
