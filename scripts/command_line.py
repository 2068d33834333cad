"""What commands have in common: how they end if used wrongly, flags that many of them have, numbers in flags."""

import collections
import contextlib
import functools
import importlib.resources
import itertools
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from dsv4jax.config import ModelConfig

flags.disclaim_key_flags()  # a flag is its script's own


def run(main: Callable[..., None], arguments: str = "") -> None:
    """Runs a command. One that is used wrongly ends with exit code 1 and a line on stderr that says what is allowed.

    Args:
      main: raises ValueError or OSError for values that are not allowed, before it begins with anything else.
      arguments: what `main` takes a list of besides flags; "" for nothing.
    """
    app.run(functools.partial(call, main, arguments), flags_parser=_parsed)


def call(main: Callable[..., None], arguments: str, argv: Sequence[str]) -> None:
    """As `run`, with flags that are parsed already.

    Raises:
      SystemExit: of a command that is used wrongly, with the line. A traceback stands above it with --verbosity=1, and
        where a library has raised the ValueError: no check has, so that it may be a fault.
    """
    verbose = logging.get_verbosity() >= logging.DEBUG  # some commands set another one
    try:
        if argv[1:] and not arguments:
            raise ValueError(f"unexpected arguments: {argv[1:]}: all are flags, which begin with --")
        main(*([argv[1:]] if arguments else []))
    except (ValueError, OSError) as error:
        if verbose or not (isinstance(error, OSError) or _is_ours(error)):
            traceback.print_exc()
        sys.exit(f"error: {error}")


def _is_ours(error: ValueError) -> bool:
    """Whether code of this project has raised it, and not JAX, which leaves its own frames out and a note on that."""
    (frame, _) = collections.deque(traceback.walk_tb(error.__traceback__), maxlen=1).pop()
    package = frame.f_globals["__name__"].partition(".")[0]
    in_script = Path(frame.f_code.co_filename).resolve().parent == Path(__file__).resolve().parent
    return not hasattr(error, "__notes__") and (in_script or package in ("dsv4jax", "sharding", "pallas_kernels"))


def _parsed(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def report_flag() -> flags.FlagHolder[str | None]:
    """The flag --report."""
    return flags.DEFINE_string("report", None, "Directory for result files and their pages.")


def compile_cache_flag() -> flags.FlagHolder[str | None]:
    """The flag --compile_cache."""
    return flags.DEFINE_string(
        "compile_cache", None, "Directory in which compiled programs are kept between runs of the same command."
    )


def implementation_flag() -> flags.FlagHolder[str | None]:
    """The flag --implementation, see `dsv4jax.implementation.with_implementation`."""
    return flags.DEFINE_enum(
        "implementation",
        None,
        ["reference", "pallas"],
        "Plain JAX or GPU kernels. Default: kernels where they can run.",
    )


def model_path(model: str | None) -> Path:
    """The directory of a flag --model, or that of the embedded model."""
    return Path(model or str(importlib.resources.files("dsv4jax") / "default_model"))


def numbers(
    name: str, texts: Sequence[str], least: float = 1, most: float = math.inf, kind: type[int] | type[float] = int
) -> list[Any]:
    """The numbers in the value of a flag, at least one, each within bounds.

    Raises:
      ValueError: they are not, by the flag's name.
    """
    try:
        found = [kind(text) for text in texts]
    except ValueError:
        found = []
    if not found or not all(least <= number <= most for number in found):
        allowed = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        kinds = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"--{name}={','.join(texts)}: must be {kinds} {allowed}")
    return found


@contextlib.contextmanager
def about(flag: flags.FlagHolder) -> Iterator[None]:
    """Within it, a ValueError is about the value of a flag, and is raised again with both."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"--{flag.name}={flag.value}: {error}") from None


def sizes_of(name: str, text: str, counts: tuple[int, ...], may_be_zero: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """The sizes that a text in the value of a flag stands for: numbers separated by x, as many as one of `counts` says.

    In each place there may be several numbers, separated by a slash: then every combination is meant.

    Args:
      may_be_zero: places whose numbers may be 0.

    Raises:
      ValueError: it is not of this form, by the flag's name.
    """
    places = [place.split("/") for place in text.split("x")]
    least = [0 if place in may_be_zero else 1 for place in range(len(places))]
    if len(places) not in counts or not all(
        number.isdecimal() and int(number) >= low for found, low in zip(places, least, strict=True) for number in found
    ):
        wanted = " or ".join("x".join("N" * count) for count in counts)
        raise ValueError(f"--{name}={text}: must be {wanted}, whole numbers of at least 1, or several like 1/8/64")
    return list(itertools.product(*([int(number) for number in found] for found in places)))


def drafts(cfg: ModelConfig, given: int | None, tables_on_device: bool) -> int:
    """The most drafts of a request and step: --drafts, by default those that the checkpoint makes.

    Args:
      tables_on_device: False for Engram tables on the host, with which there are none.

    Raises:
      ValueError: so many are not possible.
    """
    most = cfg.dspark_block_size if tables_on_device else 0
    if given and given > cfg.dspark_block_size:
        raise ValueError(f"--drafts={given}: the checkpoint's draft makes at most {cfg.dspark_block_size}")
    if given and not tables_on_device:
        raise ValueError(f"--drafts={given}: must be 0 with --engram=host, because only the device knows drafts")
    return most if given is None else given
