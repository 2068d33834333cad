"""The map of `dsv4jax.bench`: complete, and in the order in which packages need each other."""

import ast
import re
from pathlib import Path

import dsv4jax.bench

PACKAGE = Path(dsv4jax.bench.__file__).parent
ROWS = re.findall(r"^\| (`.*?) \|", dsv4jax.bench.__doc__, re.M)


def test_every_module_is_on_it_once():
    named = []
    for row in ROWS:
        package, *modules = re.findall(r"\w+", row)
        named += [f"{package}.{module}" for module in modules]
    files = [path for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    assert sorted(named) == sorted(f"{path.parent.name}.{path.stem}" for path in files)


def test_packages_need_only_those_above_them():
    order = [row.strip("`") for row in ROWS if "." not in row]
    assert len(order) == len([*PACKAGE.glob("*/__init__.py")])
    for path in PACKAGE.glob("*/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsv4jax.bench."):
                needed = node.module.split(".")[2]
                assert order.index(needed) <= order.index(path.parent.name), f"{path}: {node.module}"
