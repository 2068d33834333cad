"""Exported steps: the bits of the live ones without tracing, in other processes, and refusals of what does not fit."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import run_python
from exported_model import CFG, FLAGS, MODEL, PROMPT, export, shape
from test_serve import SERVE, call

from dsv4jax.batch import (
    DecodeBucket,
    PrefillBucket,
    PrefillChunk,
    SpeculativeRequest,
    prefill_batch,
    speculative_batch,
)
from dsv4jax.cache import CacheConfig
from dsv4jax.checkpoint.random import random_params
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.engine.engine_shape import EngineShape
from dsv4jax.engine.programs import equal_costs, list_programs
from dsv4jax.export import ExportMismatch, forbid_tracing, load, loading, program_digests
from dsv4jax.export.environment import environment
from dsv4jax.export.signature import decode, difference, encode
from dsv4jax.export.trusted import UntrustedPath
from dsv4jax.numerics import FAST, REFERENCE
from dsv4jax.sampling import request_rows
from dsv4jax.speculation import draft_step
from dsv4jax.weights import Fp8Weight
from sharding import SINGLE

RUN = "import sys, exported_model; exported_model.main(*sys.argv[1:])"


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """(exported directory, what the compiled steps give)."""
    path = tmp_path_factory.mktemp("export") / "exported"
    programs = export(path)
    return path, program_digests(programs, random_params(CFG, 3))


@pytest.fixture(scope="module")
def exported(live):
    """The directory."""
    return live[0]


@pytest.fixture(scope="module")
def loaded(exported):
    """Its steps, in this process."""
    return load(exported, xla_flags=FLAGS)


@pytest.fixture
def changed(exported, tmp_path):
    """Makes a copy of the directory whose manifest was changed."""

    def make(change):
        path = tmp_path / "changed"
        shutil.copytree(exported, path, ignore=shutil.ignore_patterns("weights"))
        manifest = json.loads((path / "manifest.json").read_text())
        change(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))
        return path

    return make


def test_another_process_gives_the_same_bits_without_tracing(live, tmp_path):
    path, expected = live
    run_python(RUN, "load", path, tmp_path / "seen", 1)
    assert json.loads((tmp_path / "seen").read_text()) == expected
    assert {name.partition("_")[0] for name in expected} == {"prefill", "draft", "decode", "cache"}


def test_over_eight_devices_as_well(tmp_path):
    for command in ("export", "load"):
        run_python(RUN, command, tmp_path / "exported", tmp_path / command, 8, devices=8)
    expected, seen = (json.loads((tmp_path / command).read_text()) for command in ("export", "load"))
    assert seen == expected and len(seen) == 2
    with pytest.raises(ExportMismatch, match="devices: exported with 8, here 1"):
        load(tmp_path / "exported", xla_flags=FLAGS, on_mismatch="recompile")


def test_the_steps_are_called_as_the_live_ones_are(loaded):
    """With the arguments of README's example; what was not exported is refused by name."""
    cache_cfg, keywords = shape().cache, {"cfg": CFG, "numerics": shape().numerics}
    pages = np.arange(6, dtype=np.int32)
    with forbid_tracing():
        params = loaded.load_params()
        cache = loaded.init_cache(CFG, cache_cfg, shape().numerics)
        rows = request_rows(PROMPT, [], {}, CFG.vocab_size)
        cache = loaded.start_request(cache, 0, *rows, len(PROMPT))
        cache = loaded.set_allowed_tokens(cache, np.zeros(1, np.int32), np.full((1, 1, 26), 0xFFFFFFFF, np.uint32))
        chunk = PrefillChunk(PROMPT, 0, len(PROMPT), 0, pages)
        batch = prefill_batch(CFG, cache_cfg, [chunk], PrefillBucket(32, 2, 6))
        cache, output = loaded.prefill_step(params, cache, batch, **keywords)
        request = SpeculativeRequest(0, pages, len(PROMPT) + 9, 1)
        drafting = speculative_batch(CFG, cache_cfg, [SpeculativeRequest(0, pages, 0, 0)], DecodeBucket(2, 1))
        verify = shape().buckets.verify[0]
        batch = speculative_batch(CFG, cache_cfg, [request], verify)
        cache, _ = loaded.draft_step(params, cache, drafting, **keywords)
        keywords["step_seconds"] = equal_costs(verify)
        cache, output = loaded.speculative_step(params, cache, batch, **keywords)
        assert output.logprobs[0, 0] < 0 and 1 <= output.counts[0] <= 2

        other = dataclasses.replace(CFG, swiglu_limit=9.0)
        larger = speculative_batch(CFG, cache_cfg, [], DecodeBucket(3, 6, 2))
        for arguments, message in (
            ((batch, keywords | {"cfg": other}), "cfg = .*swiglu_limit=9.0"),
            ((batch, {"cfg": CFG}), "numerics = "),
            ((batch, keywords | {"layout": "all"}), "layout = all"),
            ((larger, keywords), "batch: of none of the buckets that speculative_step was exported with: .*requests=2"),
        ):
            with pytest.raises(ValueError, match=message):
                loaded.speculative_step(params, cache, arguments[0], **arguments[1])
        with pytest.raises(ValueError, match=r"slots: 3 of each rank; exported are \(1, 2\)"):
            loaded.set_allowed_tokens(cache, np.zeros(3, np.int32), np.zeros((3, 1, 26), np.uint32))
        with pytest.raises(ValueError, match=r"masks: 2 places of each row; exported are \[1, "):
            loaded.set_allowed_tokens(cache, np.zeros(1, np.int32), np.zeros((1, 2, 26), np.uint32))
        with pytest.raises(ExportMismatch, match=r"config.swiglu_limit: exported with 10.0, here 9.0"):
            loaded.check_config(other)


def test_tracing_a_step_raises_where_it_is_forbidden():
    cache_cfg = shape().cache
    programs = list_programs(CFG, cache_cfg, shape().buckets, shape().numerics)
    params, cache, batch = programs[shape().buckets.draft[0]].arguments
    # Of configurations for which it was not traced before.
    first, second = (
        {"cfg": dataclasses.replace(CFG, hc_eps=eps), "numerics": shape().numerics} for eps in (2e-6, 3e-6)
    )
    with forbid_tracing(), pytest.raises(RuntimeError, match="draft_step was traced, where only exported steps"):
        draft_step.eval_shape(params, cache, batch, **first)
    draft_step.eval_shape(params, cache, batch, **second)


def test_every_entry_of_the_environment_that_differs_is_refused_by_name(changed):
    names = list(environment(1))

    def change(manifest):
        assert list(manifest["environment"]) == names
        manifest["environment"] = dict.fromkeys(names, "another")

    path = changed(change)
    with pytest.raises(ExportMismatch) as refusal:
        load(path, xla_flags=FLAGS)
    assert [name for name in names if f"{name}: exported with another, here" not in str(refusal.value)] == []


@pytest.mark.parametrize("name", ["platform", "devices"])
def test_what_no_compilation_can_make_good_is_refused_in_any_case(changed, name):
    path = changed(lambda manifest: manifest["environment"].update({name: "another"}))
    with pytest.raises(ExportMismatch, match=f"{name}: exported with another"):
        load(path, xla_flags=FLAGS, on_mismatch="recompile")


def test_other_flags_of_xla_are_a_mismatch(exported):
    with pytest.raises(ExportMismatch, match=r"xla_flags: exported with .*here .*--xla_something"):
        load(exported, xla_flags=f"{FLAGS} --xla_something=1")


def test_portable_exports_are_compiled_when_asked_and_donate(live, loaded, changed):
    """The bits are those of the live steps here, though nobody promises this."""
    path, _expected = live

    def keep_draft(manifest):
        manifest["environment"]["jaxlib"] = "0.1"
        manifest["shape"]["buckets"] |= {"prefill": [], "verify": []}

    path = changed(keep_draft)
    with pytest.raises(ExportMismatch, match=r"jaxlib: exported with 0.1, here .*on_mismatch = 'recompile'"):
        load(path, xla_flags=FLAGS)
    with forbid_tracing():
        recompiled = load(path, xla_flags=FLAGS, on_mismatch="recompile", progress=False)
    assert recompiled.recompiled and not loaded.recompiled
    params, bucket, seen = loaded.load_params(), shape().buckets.draft[0], []
    for programs in (loaded.programs(), recompiled.programs()):
        cache = programs.init_cache()
        donated, (cache, output) = cache, programs.step(bucket)(params, cache, programs.nothing(bucket))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
        seen.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((cache, output))])
    assert seen[0] == seen[1]
    with pytest.raises(TypeError, match="arguments: "):
        recompiled.programs().step(bucket)(params, cache)


def test_other_batches_than_this_code_packs_are_refused_by_name(changed):
    def change(manifest):
        program = manifest["programs"]["draft_2"]["arguments"][2]
        program["fields"]["tile"]["static"] = 2

    with pytest.raises(ExportMismatch, match=r"programs.draft_2.batch.tile: exported with 2, here 1"):
        load(changed(change), xla_flags=FLAGS).programs()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=0), "format: exported with 0, here 1"),
        (lambda m: m.pop("programs"), "malformed"),
        (lambda m: m["programs"].pop("start"), "programs: the manifest lacks start"),
        (lambda m: m["shape"].update(preset="some"), "preset = 'some'"),
        (lambda m: m["shape"]["cache"].update(slots=0), "slots = 0"),
        (lambda m: m["cache"].update(type="os.system"), "type = 'os.system': must be one of"),
        (lambda m: m["programs"]["start"]["executable"].update(file="../start.executable"), "must be a file in"),
    ],
)
def test_a_wrong_manifest_is_refused(changed, change, message):
    with pytest.raises(ValueError, match=message):
        load(changed(change), xla_flags=FLAGS)


class Opened(Exception):
    """Something was about to be unpickled."""


@pytest.fixture
def copy(exported, tmp_path, monkeypatch):
    """A copy to spoil; opening any of its executables raises `Opened`."""

    def opened(*_):
        raise Opened

    monkeypatch.setattr(loading, "deserialize_and_load", opened)
    path = tmp_path / "copy"
    shutil.copytree(exported, path)
    with pytest.raises(Opened):
        load(path, xla_flags=FLAGS)
    return path


def test_damage_is_noticed_before_a_file_is_opened(copy):
    for file in copy.glob("*.executable"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"executable' is damaged: its SHA-256 is \w+, the manifest says \w+"):
        load(copy, xla_flags=FLAGS)


@pytest.mark.parametrize("name", [".", "manifest.json", "cache.executable", ".."])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_to_is_not_opened(copy, name, mode):
    target = copy / name
    target.chmod(target.stat().st_mode | mode)
    with pytest.raises(UntrustedPath) as refusal:
        load(copy, xla_flags=FLAGS)
    assert f"{str(target.resolve())!r} is writable by others" in str(refusal.value)


def test_under_a_directory_with_the_sticky_bit_it_is_safe(copy):
    copy.parent.chmod(0o1777)
    with pytest.raises(Opened):
        load(copy, xla_flags=FLAGS)


def test_what_belongs_to_somebody_else_is_not_opened(copy, monkeypatch):
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        os.chown(copy / "manifest.json", 12345, -1)
    with pytest.raises(UntrustedPath, match=r"is owned by user .*: must be by"):
        load(copy, xla_flags=FLAGS)


def test_a_symbolic_link_is_not_followed(copy):
    (copy / "manifest.json").rename(copy / "elsewhere")
    (copy / "manifest.json").symlink_to(copy / "elsewhere")
    with pytest.raises(UntrustedPath, match="is a symbolic link"):
        load(copy, xla_flags=FLAGS)


def test_a_directory_without_an_export_is_named(tmp_path):
    for path, message in ((tmp_path, "not an exported directory"), (tmp_path / "none", "no directory")):
        with pytest.raises(FileNotFoundError, match=message):
            load(path)
    with pytest.raises(ValueError, match="on_mismatch = 'ignore': must be"):
        load(tmp_path, on_mismatch="ignore")


def test_the_files_that_are_written_can_be_loaded_whatever_the_umask(exported):
    for file in (exported, *exported.glob("*.*")):
        assert not file.stat().st_mode & 0o022


def test_signatures_are_read_back_as_they_were():
    """Of every program, packed weights included."""
    cfg = reduced_config(6, engram_vocab_size=1000)
    cache = CacheConfig(slots=2, pages=8, drafts="own")
    buckets = dataclasses.replace(
        shape().buckets, prefill=(PrefillBucket(16, 1, 2, prompt_logprobs=True),), verify=(), decode=()
    )
    numerics = dataclasses.replace(REFERENCE, implementation="pallas")
    for program in list_programs(cfg, cache, buckets, numerics).values():
        tree = (program.arguments, dict(program.options))
        signature = encode(tree)
        again = decode(json.loads(json.dumps(signature)), SINGLE)
        assert jax.tree.structure(again) == jax.tree.structure(tree)
        for leaf, expected in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
            assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        assert difference(signature, encode(again), "all") is None


def test_the_first_difference_of_signatures_is_named():
    def signature(dtype=jnp.int8, block=(1, 2), key="b"):
        return encode({"a": (Fp8Weight(np.zeros((2, 4), dtype), np.zeros(3), block), None), key: np.zeros(1)})

    for changes, message in (
        ({"dtype": jnp.uint8}, "all.a.0.weight: exported with int8[2, 4], here uint8[2, 4]"),
        ({"block": (1, 3)}, "all.a.0.block: exported with [1, 2], here [1, 3]"),
        ({"key": "c"}, "all: exported with {'dict': "),
    ):
        assert difference(signature(), signature(**changes), "all").startswith(message)


def test_shapes_are_read_back_as_they_were():
    slots = {"expert_slots": 3, "draft_expert_slots": 5}
    for changes in ({}, {"numerics": FAST, "preset": "latency", "devices": 4, "replay": "bounded", **slots}):
        made = dataclasses.replace(shape(), **changes)
        assert EngineShape.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_no_step_depends_on_code_that_is_not_hashed():
    code = "import sys, dsv4jax.engine.programs; print([m for m in sys.modules if m.startswith('dsv4jax.')])"
    modules = set(eval(run_python(code)))
    assert "dsv4jax.steps" in modules
    assert not [m for m in modules if m.split(".")[1] in ("server", "chat", "bench", "export")]


SCRIPTS = Path(SERVE[1]).parent


def script(name, *arguments, **kwargs):
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, **kwargs)


def test_the_command_that_generates(exported):
    arguments = ["--prompt=ab", "--prompt=Once upon", "--max_tokens=6", "--seed=1", f"--executables={exported}"]
    done = script("generate.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^--- (.*)$", done.stdout, re.M) == ["'ab'", "'Once upon'"]
    assert re.search(r"decode \d+ tokens .*; 2 prompts, .*\nfirst token .* s after the start: programs", done.stderr)


def test_the_server_answers_without_compiling_anything(exported):
    command = [*SERVE, f"--executables={exported}", "--strict"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        log = []
        for line in server.stderr:
            log.append(line)
            if found := re.search(r"listening on ([\d.]+:\d+)", line):
                break
        else:
            raise AssertionError("".join(log))
        address = f"http://{found[1]}"
        body = {"prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        answer = json.loads(call(address, "/v1/completions", body))
        assert answer["usage"]["completion_tokens"] == 9
        metrics = call(address, "/metrics").decode()
        assert re.search(r"^vllm:spec_decode_num_drafts_total{.*} [1-9]", metrics, re.M)
        assert re.search(r"^dsv4jax:compilations_total{.*} 0.0$", metrics, re.M)
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
        assert server.wait(60) == 0
    finally:
        server.kill()


def test_the_command_that_exports_for_a_gpu_that_is_not_here(exported, tmp_path):
    """What it wrote, and what is refused of it and of others."""
    sizes = ["--max_model_len=48", "--page_size=8", "--pages=12", "--slots=2", "--prefill_tokens=64", "--drafts=0"]
    output = tmp_path / "cuda"
    options = ["--noweights", "--target=cuda", "--deterministic"]
    done = script("export.py", f"--model={exported}", f"--output={output}", *options, *sizes)
    assert done.returncode == 0, done.stderr
    assert not list(output.glob("*.executable")) and len(list(output.glob("*.stablehlo"))) == 7
    program = jax.export.deserialize(bytearray((output / "decode_2x6x1.stablehlo").read_bytes()))
    assert program.platforms == ("cuda",)
    refusals = {
        (f"--executables={output}", "--on_mismatch=recompile"): "platform: exported with cuda, here cpu",
        (
            f"--executables={exported}",
            "--replay=exact",
        ): "--replay: --executables decides it, must not be given with it",
        (f"--executables={exported}", f"--model={MODEL}"): "config.num_hidden_layers: exported with 2, here 10",
        (f"--executables={exported}", "--max_tokens=60"): "exceed the context of 48 tokens",
    }
    errors = json.loads(run_python(REFUSED, SCRIPTS, json.dumps([*refusals])).splitlines()[-1])
    for message, error in zip(refusals.values(), errors, strict=True):
        assert message in error


# The errors of scripts/generate.py with several lists of flags.
REFUSED = """
import json, sys
from absl import flags
from absl.testing import flagsaver
sys.path.insert(0, sys.argv[1])
import generate
errors = []
for arguments in json.loads(sys.argv[2]):
    with flagsaver.flagsaver():
        flags.FLAGS(["generate", "--prompt=a", *arguments])
        try:
            generate.main()
        except ValueError as error:
            errors.append(str(error))
print(json.dumps(errors))
"""
