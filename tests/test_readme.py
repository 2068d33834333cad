"""What the README shows works."""

import importlib.resources
import re
from pathlib import Path

import numpy as np

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    path = importlib.resources.files("dsv4jax") / "default_model"
    exec(example, {"path": path, "prompt": np.arange(3, 203, dtype=np.int32)})
    token, logprob = capsys.readouterr().out.split()
    assert 0 <= int(token) < 805
    assert float(logprob) < 0


def test_the_scripts_it_names_exist():
    scripts = set(re.findall(r"python (scripts/\w+\.py)", README))
    assert len(scripts) >= 3
    for script in scripts:
        assert (Path(__file__).parent.parent / script).is_file(), script
