"""Compiled steps as files: written once for a kind of device, loaded in seconds without tracing (docs/export.md)."""

from dsv4jax.export.generating import ExportedGenerator
from dsv4jax.export.loading import ExportedSteps, load
from dsv4jax.export.manifest import ExportMismatch, read_manifest
from dsv4jax.export.saving import export_steps
from dsv4jax.export.tracing import forbid_tracing

__all__ = [
    "ExportMismatch",
    "ExportedGenerator",
    "ExportedSteps",
    "export_steps",
    "forbid_tracing",
    "load",
    "read_manifest",
]
