"""Run-time checker for the annotations of functions, used by the import hook in `conftest.py`."""

from beartype import beartype


def check(function):
    """Checks calls of a function; constructors of dataclasses are left alone.

    A pytree's fields hold device arrays, host arrays, specs or one mapped row of them, as the transformation at hand
    rebuilds it.
    """
    return function if function.__name__ == "__init__" else beartype(function)
