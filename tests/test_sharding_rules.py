"""Sharding rules: what a rule set does to the model's own declarations, and what it refuses."""

import dataclasses
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from dsv4jax.config import ModelConfig
from dsv4jax.params import abstract_params, bytes_per_device, named_leaves
from sharding import Layout, ShardingRules, expert_parallel, make_mesh, padded_shape, sharding_for

EIGHT = AbstractMesh((8,), ("rank",), axis_types=(AxisType.Explicit,))


@pytest.fixture(scope="module")
def released_specs():
    return dict(named_leaves(abstract_params(ModelConfig(), tables_on_device=False)))


@pytest.mark.parametrize("rules", [ShardingRules(), expert_parallel()])
def test_every_declared_axis_has_a_rule_and_experts_alone_are_sharded(released_specs, rules):
    for name, spec in released_specs.items():
        sharding = sharding_for(spec.axes, rules, EIGHT, name=name, shape=spec.shape)
        expected = ["rank" if axis == "expert" and rules.expert else None for axis in spec.axes]
        assert sharding.spec == PartitionSpec(*expected), name
    if rules.expert:
        spec = released_specs["layers.3.ffn.experts.*.w1.weight"]
        sharding = sharding_for(spec.axes, rules, EIGHT, name="w1", shape=spec.shape)
        assert sharding.shard_shape(spec.shape) == (48, 2304, 2560)


def test_engram_rows_are_spread_and_filled_up():
    rules = expert_parallel()
    assert padded_shape(("engram_rows", None), (13, 4), rules, EIGHT) == (16, 4)
    assert padded_shape(("expert", None), (13, 4), rules, EIGHT) == (13, 4)
    assert padded_shape(("engram_rows", None), (13, 4), ShardingRules(), EIGHT) == (13, 4)
    assert padded_shape(("engram_rows", None), (13, 4), rules, None) == (13, 4)
    sharding = sharding_for(("engram_rows", None), expert_parallel(), EIGHT, name="table", shape=(16, 4))
    assert sharding.spec == PartitionSpec("rank", None)


def test_one_mesh_axis_for_two_dimensions_is_refused():
    rules = dataclasses.replace(expert_parallel(), embed="rank")
    with pytest.raises(ValueError, match=r"w1 with axes .*'expert' and 'embed'.*mesh axis 'rank'"):
        sharding_for(("expert", None, "embed"), rules, EIGHT, name="w1", shape=(8, 3, 8))


def test_uneven_dimension_is_refused_with_its_size_and_the_devices():
    with pytest.raises(ValueError, match=r"w1: dimension 'expert' of size 12 .* 8 devices"):
        sharding_for(("expert", None), expert_parallel(), EIGHT, name="w1", shape=(12, 4))


@pytest.mark.parametrize(
    ("axes", "rules", "message"),
    [
        (("experts",), expert_parallel(), "w: logical axis 'experts' has no sharding rule"),
        (("vocab",), ShardingRules(vocab="tensor"), "rule of 'vocab' names mesh axis 'tensor'"),
    ],
)
def test_unknown_axes_are_refused(axes, rules, message):
    with pytest.raises(ValueError, match=message):
        sharding_for(axes, rules, EIGHT, name="w", shape=(8,))


def test_mesh():
    mesh = make_mesh(1, "x")
    assert dict(mesh.shape) == {"x": 1}
    assert mesh.devices.tolist() == jax.devices()[:1]
    with pytest.raises(ValueError, match="mesh of 99 devices: allowed are 1 to"):
        make_mesh(99)


def test_layouts_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"exchange = 'psum': must be one of"):
        Layout(exchange="psum")
    with pytest.raises(ValueError, match=r"mesh with axes \('x',\): must be \('rank',\)"):
        Layout(make_mesh(1, "x"))


@pytest.mark.parametrize("devices", [1, 8, 64])
def test_the_table_of_the_documentation(devices):
    held = bytes_per_device(ModelConfig(), expert_parallel(), devices)
    row = [str(devices), *(f"{b / 1e9:.2f}" for b in held.values()), f"{sum(held.values()) / 1e9:.1f}"]
    page = (Path(__file__).parent.parent / "docs/parallelism.md").read_text()
    assert f"| {' | '.join(row)} |" in page
    if devices == 1:
        specs = named_leaves(abstract_params(ModelConfig()))
        assert sum(held.values()) == sum(spec.nbytes for _, spec in specs)
