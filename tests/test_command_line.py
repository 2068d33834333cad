"""Every command, used wrongly: one line that says what is allowed, before anything begins."""

import json
import subprocess
import sys
from unittest import mock

import jax
import pytest
from absl import app
from bench_scripts import SCRIPTS, load_script

COMMANDS = {path.stem for path in SCRIPTS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
WRONG = {
    "bench_acceptance": (["--number=0"], "flag --number=0: 0 is not a positive integer"),
    "bench_admission": (["--running=64"], "running = 64: must be less than 64, all slots"),
    "bench_agents": (["--ids=5"], "--ids=5: must be two ascending token ids, not neighbours"),
    "bench_balance": (
        ["--slots=1"],
        "--slots=1: 32 ranks of 1 expert slots: 384 experts need at least 384 slots",
    ),
    "bench_decode": (["--points=8"], "--points=8: must be NxN, whole numbers of at least 1"),
    "bench_drafts": (["--fixed=9"], "--fixed=9: must be whole numbers from 1 to 5"),
    "bench_kernels": ([], "the default device is cpu: kernels are timed on a GPU"),
    "bench_parallel": (["--devices=999"], "--devices=999: must be from 2 to "),
    "bench_peers": ([], "the default device is cpu: kernels are timed on a GPU"),
    "bench_ranks": (["--ranks=2", "--slow_seconds=5"], "--slow_seconds=5.0: seconds = 5.0: must be more than 10.0"),
    "bench_routing": (["--drafts=9"], "--drafts=9: must be from 1 to 5"),
    "bench_startup": (["--max_model_len=99999"], "--max_model_len=99999: the model's context is 16384"),
    "bench_steps": (["--decode=8x1"], "--decode=8x1: must be NxNxN, whole numbers of at least 1"),
    "convert": (["--input=nowhere", "--output=out"], "no config.json in 'nowhere': not a checkpoint directory"),
    "evaluate_default": (["--lengths=9"], "--lengths=9: must be whole numbers of at least 65"),
    "export": (["--output=out", "--noweights", "--check"], "--check: needs weights"),
    "generate": (["--prompt=a", "--temperature=9"], "temperature must be a number at least 0.0 and at most 2.0, got 9"),
    "make_checkpoint": (["--tokenizer=nowhere", "--output=out"], "no tokenizer file 'nowhere'"),
    "make_default_model": (["--output=nowhere"], "no tokenizer file 'nowhere/tokenizer.json'"),
    "make_tokenizer": (["--text=nowhere"], "[Errno 2] No such file or directory: 'nowhere'"),
    "plan": (["--utilization=2"], "utilization = 2.0: must be greater than 0 and at most 1"),
    "report": (["--report=out"], "result files: at least one must be given"),
    "serve": (["--request_timeout=-1"], "request_timeout = -1.0: must be above 0"),
    "soak_server": (["--streams=0"], "flag --streams=0: 0 is not a positive integer"),
    "train_default": (["--directory=run", "--plan=nowhere"], "[Errno 2] No such file or directory: 'nowhere'"),
}


def last_line(name, arguments):
    """The line that a command ends with."""
    run = mock.patch.object(app, "run", lambda main, flags_parser: main(flags_parser([name, *arguments])))
    with run, pytest.raises(SystemExit) as end:
        load_script(name, "__main__")
    return end.value.code


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_what_is_not_allowed_is_told_in_one_line(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setitem(sys.modules, "torch", mock.MagicMock())  # a peer, which need not be there
    arguments, told = WRONG[name]
    line = last_line(name, arguments)
    assert line.startswith(f"error: {told}") and "\n" not in line
    assert not [*tmp_path.iterdir()]


def test_arguments_and_flags_that_there_are_not_are_refused():
    assert last_line("plan", ["h200"]) == "error: unexpected arguments: ['h200']: all are flags, which begin with --"
    assert last_line("plan", ["--tft=1"]) == "error: Unknown command line flag 'tft'. Did you mean: ttft ?"
    needed = "flag --input=None: Flag --input must have a value other than None."
    assert last_line("convert", ["--output=out"]) == f"error: {needed}"


def test_no_devices_are_not_all_there_are():
    line = last_line("bench_parallel", ["--devices=0", "--model=nowhere"])
    assert line.startswith("error: --devices=0: must be from 2 to ")


def test_a_process_ends_with_the_line_and_a_traceback_only_if_asked_for():
    command = [sys.executable, SCRIPTS / "report.py", "--report=out"]
    line = "error: result files: at least one must be given\n"
    for verbosity, traceback in (("0", ""), ("1", "Traceback (most recent call last):\n")):
        done = subprocess.run([*command, f"--verbosity={verbosity}"], capture_output=True, text=True)
        assert done.returncode == 1 and not done.stdout
        assert done.stderr.startswith(traceback or line) and done.stderr.endswith(line)


@pytest.mark.parametrize("fault", [lambda: jax.numpy.concatenate([]), lambda: json.loads("?")])
def test_a_value_error_of_a_library_keeps_its_traceback(capsys, fault):
    script, _ = load_script("command_line")
    with pytest.raises(SystemExit, match="error: "):
        script.call(fault, "", ["command"])
    assert "in <lambda>" in capsys.readouterr().err


def test_an_error_of_jax_below_code_of_this_project_is_no_check():
    """JAX leaves its frames out, so that the project's own seem to have raised it, and a note on that."""
    script, _ = load_script("command_line")
    with pytest.raises(ValueError, match="--sizes=a: must be whole numbers") as caught:
        script.numbers("sizes", ["a"])
    assert script._is_ours(caught.value)
    caught.value.add_note("frames were left out")
    assert not script._is_ours(caught.value)
