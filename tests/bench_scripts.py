"""What tests of the measuring scripts share: the scripts themselves, and a model that compiles fast."""

import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

from absl import flags
from golden import drafting_model

from dsv4jax.config import ModelConfig

SCRIPTS = Path(__file__).parent.parent / "scripts"


def load_script(name: str, module_name: str = "") -> tuple[ModuleType, flags.FlagValues]:
    """A script and its flags, which are its own: other scripts in the process have flags of the same names.

    Of modules that scripts share, it gets its own as well. With "__main__" as its name it runs.
    """
    own = flags.FlagValues()
    kinds = [kind for kind in dir(flags) if kind.startswith("DEFINE_")]
    defining = {kind: functools.partial(getattr(flags, kind), flag_values=own) for kind in kinds}
    spec = importlib.util.spec_from_file_location(module_name or name, SCRIPTS / f"{name}.py")
    script: ModuleType = importlib.util.module_from_spec(spec)
    shared = [path.stem for path in SCRIPTS.glob("*.py")]
    others = {stem: sys.modules.pop(stem) for stem in shared if stem in sys.modules}
    try:
        with (
            mock.patch.multiple(flags, FLAGS=own, **defining),
            mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]),
        ):
            spec.loader.exec_module(script)
    finally:
        for stem in shared:
            sys.modules.pop(stem, None)
        sys.modules.update(others)
    return script, own


def run_script(name: str, *arguments: str, **replaced: object) -> None:
    """Runs `main` of a script, with other values for some of its names."""
    script, own = load_script(name)
    with mock.patch.multiple(script, main=script.main, **replaced):
        others = own([name, *arguments])[1:]
        script.main(*[others] * bool(others))


def small_config() -> ModelConfig:
    """Two layers and a draft stage."""
    return dataclasses.replace(
        drafting_model().cfg,
        num_hidden_layers=2,
        num_nextn_predict_layers=1,
        compress_ratios=(2, 1, 0),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=1,
        engram_layer_ids=(0,),
        dspark_target_layer_ids=(0, 1),
        dspark_n_routed_experts=8,
        hc_sinkhorn_iters=2,
    )
