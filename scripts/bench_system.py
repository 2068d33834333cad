"""Flags that say what a benchmark measures: an engine on the simulated executor or on a model."""

from collections.abc import Mapping
from typing import Any

import command_line
import jax
import numpy as np
from absl import flags

from dsv4jax.bench.engines.system import Sizes, System, load_system, simulated_system
from dsv4jax.bench.planning.cost_model import HardwareCost
from dsv4jax.bench.planning.hardware import load_hardware
from dsv4jax.bench.results.conditions import conditions, flag_values
from dsv4jax.bench.steps.ceilings import measured_ceilings
from dsv4jax.config import ModelConfig
from dsv4jax.engine.simulated import CostModel, LinearCost, fixed_acceptance

EXECUTOR = flags.DEFINE_enum(
    "executor", "simulated", ["simulated", "model"], "A virtual clock with a simple model of cost, or the model itself."
)
_HARDWARE = flags.DEFINE_string(
    "hardware",
    None,
    "What steps of --executor=simulated cost: those of the released model on h200, b300, gb300 or a hardware file, see"
    " docs/planner.md. Default: round numbers, no machine's.",
)
_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory of --executor=model. Default: the embedded model.")
_RANDOM = flags.DEFINE_bool("random_weights", False, "Weights are drawn: --model needs a config.json only.")
_IMPLEMENTATION = command_line.implementation_flag()
RANKS = flags.DEFINE_integer("ranks", 1, "Data-parallel ranks, one per device; on the CPU devices are virtual.", 1)
SLOTS = flags.DEFINE_integer("slots", 16, "Requests that run at the same time on a rank.", 1)
MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", 16384, "Most tokens of prompt and output together.", 1)
_PREFILL_TOKENS = flags.DEFINE_integer("prefill_tokens", 2048, "Most tokens of prompts in a step of a rank.", 128)
_PAGES = flags.DEFINE_integer("pages", None, "Pages of a rank's cache. Default: all slots at full length.", 1)
_ACCEPTANCE = flags.DEFINE_list(
    "acceptance",
    [],
    "Share of drafts that are accepted if those before are, by position; as many drafts. None by default.",
)
SEED = flags.DEFINE_integer("seed", 0, "Of prompts and lengths.", 0)


def make_system(*, random_contents: bool = False, sizes: Mapping[str, Any] | None = None, **policy: Any) -> System:
    """The system that the flags say.

    Args:
      random_contents: a model's cache holds random records from the beginning.
      sizes: fields of `Sizes` in the place of flags.
      policy: fields of `SchedulerConfig`.

    Raises:
      ValueError: a flag has a value that is not allowed, by its name.
    """
    law = acceptance()
    from_flags = dict(
        ranks=RANKS.value,
        slots=SLOTS.value,
        max_model_len=MAX_MODEL_LEN.value,
        prefill_tokens=_PREFILL_TOKENS.value,
        pages=_PAGES.value,
        drafts=len(law),
    )
    all_sizes = Sizes(**{**from_flags, **(sizes or {})})
    if EXECUTOR.value == "simulated":
        return simulated_system(all_sizes, _cost(), fixed_acceptance(law.tolist(), SEED.value), **policy)
    if RANKS.value > 1:  # of use on the CPU only
        jax.config.update("jax_num_cpu_devices", RANKS.value)
    return load_system(
        command_line.model_path(_MODEL.value),
        all_sizes,
        _IMPLEMENTATION.value,
        random_weights=_RANDOM.value,
        random_contents=random_contents,
        forced_acceptance=law if len(law) else None,
        **policy,
    )


def _cost() -> CostModel:
    if _HARDWARE.value is None:
        return LinearCost()
    return HardwareCost(ModelConfig(), load_hardware(_HARDWARE.value), RANKS.value)


def acceptance() -> np.ndarray:
    """Of each draft given those before it.

    Raises:
      ValueError: the flag holds something else than shares.
    """
    texts = _ACCEPTANCE.value
    return np.array(command_line.numbers("acceptance", texts, 0, 1, float) if texts else [], np.float32)


def system_ceiling() -> dict[str, Any]:
    """What nothing that the flags say can exceed, for `Result.ceiling`; to be asked once the system is made."""
    if EXECUTOR.value == "model":
        return measured_ceilings()
    if _HARDWARE.value is not None:
        return load_hardware(_HARDWARE.value).as_ceiling()
    return {"what": "assumed: steps take the round numbers of `LinearCost`, which are no machine's rates"}


def system_conditions(system: System | None, names: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions of a result.

    Args:
      system: None where nothing but the scheduler ran.
      names: global names of the script, which its flags are among.
    """
    others: dict[str, Any] = {}
    programs = None if system is None else system.programs
    if programs is not None:
        others["implementation"] = programs.numerics.implementation
    elif system is not None:
        cost = _cost()
        others["costs"] = vars(cost) if isinstance(cost, LinearCost) else cost.hardware.as_dict()
    return conditions(
        model="none" if system is None else system.name,
        layout=f"{RANKS.value} data-parallel ranks",
        flags=flag_values(globals()) | flag_values(names),
        seed=SEED.value,
        devices=() if programs is None else jax.devices()[: RANKS.value],
        **others,
    )
