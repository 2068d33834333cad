"""Plain text to train on, with a licence that allows to pass on what was learnt from it.

Documentation strings of Python's standard library (PSF License Version 2, which permits derivative works), read from
the sources of the running interpreter: other Python versions give slightly other text.
"""

import ast
import sysconfig
import zlib
from pathlib import Path

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "pydoc_data"}
_SHORTEST = 150


def standard_library_texts(held_out: bool, directory: Path | None = None) -> list[str]:
    """Documentation strings of at least 150 characters, ASCII only, without repeats, in the order of file names.

    Args:
      held_out: the one in sixteen that is examined, or the others.
      directory: of the library's sources; default: the running interpreter's.
    """
    root = directory or Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, None] = {}
    for file in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(file.relative_to(root).parts[:-1]):
            for text in _documentation(file):
                if len(text) >= _SHORTEST and text.isascii():
                    texts[text] = None
    return [text for text in texts if (zlib.crc32(text.encode()) % 16 == 0) == held_out]


def _documentation(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []  # samples of broken code
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]
