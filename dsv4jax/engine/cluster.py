"""The JAX side of an engine over several processes."""

import jax

from dsv4jax.engine.channel import ChannelConfig

_SHUTDOWN_SECONDS = 30


def join_cluster(config: ChannelConfig) -> None:
    """Joins the JAX cluster of the channel's processes: afterwards `jax.devices()` are those of all of them.

    To be called before anything else of JAX. JAX's coordinator, in process 0, takes the port after the channel's.
    SIGTERM stays with the caller; JAX's own service for it is switched off.

    Raises:
      RuntimeError: JAX has been used before, or the processes do not find each other in time.
    """
    jax.config.update("jax_enable_preemption_service", False)
    address = f"{config.host}:{config.port + 1}"
    jax.distributed.initialize(
        address,
        config.processes,
        config.process,
        cluster_detection_method="deactivate",
        initialization_timeout=int(config.start_seconds),
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        coordinator_bind_address=address,
    )
