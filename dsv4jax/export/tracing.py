"""The promise that nothing of the model is traced, kept by an exception."""

import contextlib
from collections.abc import Iterator

import jax

from dsv4jax.speculation import draft_step, speculative_step
from dsv4jax.steps import decode_step, forward, prefill_step, set_allowed_tokens, start_request

_TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"
_STEPS = {
    step.__name__
    for step in (prefill_step, decode_step, draft_step, speculative_step, start_request, set_allowed_tokens)
} | {f"_{forward.__name__}"}


@contextlib.contextmanager
def forbid_tracing() -> Iterator[None]:
    """Within it, tracing any of the step functions raises RuntimeError, in every thread of the process."""

    def check(event: str, _seconds: float, fun_name: str = "", **_: object) -> None:
        if event == _TRACE_EVENT and fun_name in _STEPS:
            raise RuntimeError(f"{fun_name} was traced, where only exported steps may run")

    jax.monitoring.register_event_duration_secs_listener(check)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(check)
