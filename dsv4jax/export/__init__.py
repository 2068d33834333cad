"""Compiled steps as files: written once for a kind of device, loaded in seconds without tracing (docs/export.md)."""

from dsv4jax.export.checking import compare_programs, program_digests
from dsv4jax.export.loading import ExportedSteps, load, load_weights
from dsv4jax.export.manifest import ExportMismatch, read_manifest
from dsv4jax.export.saving import export_steps
from dsv4jax.export.tracing import forbid_tracing

__all__ = [
    "ExportMismatch",
    "ExportedSteps",
    "compare_programs",
    "export_steps",
    "forbid_tracing",
    "load",
    "load_weights",
    "program_digests",
    "read_manifest",
]
