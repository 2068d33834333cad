"""Kernels in tests: lowering them for a Hopper GPU on any machine, and which tests run where."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.device import hopper_obstacle
from sharding.rules import RANK_AXIS

needs_hopper = pytest.mark.skipif(hopper_obstacle() is not None, reason="runs kernels: needs a Hopper GPU")
needs_no_hopper = pytest.mark.skipif(hopper_obstacle() is None, reason="tests what is refused without a Hopper GPU")


_H200 = AbstractDevice(device_kind="NVIDIA H200", platform="cuda", num_cores=132)


def on_hopper() -> contextlib.AbstractContextManager[Any]:
    """Within it, what is traced is for an H200."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=_H200))


def hopper_mesh(devices: int) -> AbstractMesh:
    """The mesh of `sharding.make_mesh` over H200s that need not be there."""
    return AbstractMesh((devices,), (RANK_AXIS,), axis_types=(AxisType.Explicit,), abstract_device=_H200)


def lowered_for_hopper(fn: Callable[..., Any], *arguments: Any) -> str:
    """The StableHLO of a function for an H200; `arguments` are arrays or their shapes."""
    with on_hopper():
        return jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
