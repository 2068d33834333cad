"""Kernels in tests: lowering them for a Hopper GPU on any machine, and which tests run where."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jaxlib.mlir import ir

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


def decided_by_the_host(lowered: jax.stages.Lowered) -> list[str]:
    """Conditionals and loops of a program for a GPU before which the host would wait for the device.

    Not those whose branch is a constant, nor loops that run up to one.
    """
    found = []

    def constant(value: Any) -> bool:
        owner = value.owner
        name = getattr(owner, "name", None)
        passed = ("stablehlo.case", "sdy.sharding_constraint")
        return name == "stablehlo.constant" or (name in passed and constant(owner.operands[0]))

    def visit(operation: Any) -> Any:
        name = operation.operation.name
        if name in ("stablehlo.case", "stablehlo.if"):
            if not constant(operation.operands[0]):
                found.append(str(operation.location))
        elif name == "stablehlo.while":
            head, body = (region.blocks[0] for region in operation.regions)
            compared = list(head.operations)[-1].operands[0].owner
            bounds = list(compared.operands) if getattr(compared, "name", None) == "stablehlo.compare" else []
            for i, argument in enumerate(head.arguments):
                if argument in bounds and list(body.operations)[-1].operands[i] == body.arguments[i]:
                    bounds.append(operation.operands[i])  # carried through the loop as it was
            if not any(map(constant, bounds)):
                found.append(str(operation.location))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found
