"""Engram tables that stay on the host, in the mapped files of the checkpoint (architecture section 6)."""

from pathlib import Path

import numpy as np
from jaxtyping import Int

from dsv4jax.checkpoint.safetensors import SafetensorsReader
from dsv4jax.checkpoint.values import convert_exactly, find_nan
from dsv4jax.config import ModelConfig
from dsv4jax.params import checkpoint_inventory
from dsv4jax.quant import BLOCK
from dsv4jax.weights import STORED_DTYPES, DenseWeight, Fp8Weight, Weight


class HostEngramTables:
    """The tables of a checkpoint; only the rows that are looked up are ever read."""

    def __init__(self, path: str | Path, cfg: ModelConfig):
        """Opens and checks the checkpoint.

        Raises:
          FileNotFoundError, ValueError: as `load_params`.
        """
        self._reader = SafetensorsReader(path)
        inventory = checkpoint_inventory(cfg)
        self._reader.check(inventory)
        self._columns = cfg.engram_hash_columns
        self._tables = []
        for layer in cfg.engram_layer_ids:
            names = [f"layers.{layer}.engram.embed.{kind}" for kind in ("weight", "scale")[: 1 + cfg.quantized]]
            self._tables.append({name: inventory[name].dtype for name in names})
            for name in names:
                self._reader.expect_random_access(name)

    def lookup(self, rows: Int[np.ndarray, "tokens layers columns"]) -> tuple[Weight, ...]:
        """Table rows per Engram layer, for `StepBatch.engram_rows`.

        Args:
          rows: row ids as `engram_hash.rows_on_host` gives them.

        Returns:
          Per layer the stored rows as numpy arrays: `Fp8Weight` with weight [tokens, columns, dim] E4M3 and scale
          [tokens, columns, dim/32] UE8M0 bytes, or `DenseWeight` [tokens, columns, dim] BF16.

        Raises:
          ValueError: wrong shape, a row outside its table, or a NaN code in a row.
        """
        if rows.ndim != 3 or rows.shape[1:] != (len(self._tables), self._columns):
            raise ValueError(f"rows has shape {rows.shape}: expected [tokens, {len(self._tables)}, {self._columns}]")
        found: list[Weight] = []
        for i, names in enumerate(self._tables):
            parts = [self._gather(name, stored, rows[:, i]) for name, stored in names.items()]
            found.append(Fp8Weight(*parts, block=(1, BLOCK)) if len(parts) == 2 else DenseWeight(*parts))
        return tuple(found)

    def _gather(self, name: str, stored: str, rows: Int[np.ndarray, "tokens columns"]) -> np.ndarray:
        table = self._reader.view(name)
        if rows.size and not (0 <= rows.min() and rows.max() < table.shape[0]):
            bad = rows[(rows < 0) | (rows >= table.shape[0])][0]
            raise ValueError(f"row {bad} is outside {name!r}: allowed are 0 to {table.shape[0] - 1}")
        # As bytes: numpy gathers its own types several times faster than the float types of ml_dtypes.
        taken = table.view(np.uint8).take(rows.reshape(-1), axis=0).view(table.dtype)
        if (found := find_nan(stored, taken)) is not None:
            raise ValueError(f"tensor {name!r}: {stored} code of NaN at {[int(rows.reshape(-1)[found[0]]), found[1]]}")
        return convert_exactly(name, taken, STORED_DTYPES[stored], (0, 0)).reshape(*rows.shape, table.shape[1])
