"""JAX's persistent compilation cache: what a process has compiled, later ones find in a directory.

A program is found by a key of itself, the devices, what it is compiled with, the versions of JAX and its compiler, and
for JAX 0.10 the path of the directory. JAX compiles what it finds damaged, with a warning, at every start until the
directory is emptied. Of several processes only process 0 writes; on CPUs the others have keys of their own, and compile
at every start. Entries are code, and reading them runs it: nobody else may write to the directory.
"""

import dataclasses

import jax

_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
_FOUND = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass(eq=False)
class CacheCounts:
    """Programs since the cache is used."""

    asked: int = 0
    """That this process wanted to have compiled."""
    found: int = 0
    """Of these, in the directory."""


def use_compilation_cache(directory: str | None) -> CacheCounts:
    """Keeps every compiled program in a directory, and takes it from there; None keeps none.

    To be called before anything is compiled. Holds, as the counting does, until the process ends.
    """
    counts = CacheCounts()
    if directory is None:
        return counts

    def seen(event: str, **_: object) -> None:
        counts.asked += event == _ASKED
        counts.found += event == _FOUND

    jax.monitoring.register_event_listener(seen)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return counts
