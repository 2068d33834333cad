"""What an engine will keep in memory, told before anything is loaded."""

import dataclasses
from pathlib import Path

import pytest

import dsv4jax
from dsv4jax.cache import CacheConfig
from dsv4jax.checkpoint.reduced_config import reduced_config
from dsv4jax.config import ModelConfig
from dsv4jax.engine import memory_plan as module
from dsv4jax.engine.memory_plan import memory_plan, pages_that_fit
from dsv4jax.numerics import REFERENCE
from dsv4jax.params import bytes_per_device
from sharding import Layout, abstract_mesh, expert_parallel

CACHE = CacheConfig(slots=4, pages=1, page_size=64)


@pytest.fixture(scope="module")
def cfg():
    return ModelConfig.from_checkpoint(Path(dsv4jax.__file__).parent / "default_model")


def set_free(monkeypatch, free):
    monkeypatch.setattr(module, "available_device_memory", lambda device: free)
    monkeypatch.setattr(module, "available_host_memory", lambda: None)


def test_no_page_fits_is_not_the_same_as_unknown(cfg, monkeypatch):
    set_free(monkeypatch, None)
    assert pages_that_fit(cfg, CACHE, REFERENCE, spare=0) is None
    set_free(monkeypatch, 1 << 20)
    assert pages_that_fit(cfg, CACHE, REFERENCE, spare=0) == 0


@pytest.mark.parametrize("spare", [0, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"tables_on_device": False, "fraction": 0.5}])
def test_the_pages_that_fit_are_those_with_which_the_plan_fits(cfg, monkeypatch, spare, options):
    set_free(monkeypatch, 20 << 20)
    pages = pages_that_fit(cfg, CACHE, REFERENCE, spare=spare, **options)
    assert pages > 1
    memory_plan(cfg, dataclasses.replace(CACHE, pages=pages), REFERENCE, workspace=spare, **options).require()
    more = memory_plan(cfg, dataclasses.replace(CACHE, pages=pages + 1), REFERENCE, workspace=spare, **options)
    with pytest.raises(ValueError, match="not enough memory: the memory plan needs"):
        more.require()


def test_the_table_names_every_purpose_and_what_is_unknown(cfg, monkeypatch):
    set_free(monkeypatch, None)
    plan = memory_plan(cfg, CACHE, REFERENCE)
    plan.require()
    table = plan.table()
    names = [line.split()[0] for line in table.splitlines()]
    assert names == ["weights", "tables", "pages", "windows", "sampling", "workspace", "total"]
    assert "known after compiling" in table and "(unknown)" in table


def test_packing_for_kernels_counts_before_the_cache_exists_and_not_beside_it(monkeypatch):
    set_free(monkeypatch, None)
    released = reduced_config(6, n_routed_experts=8, engram_vocab_size=1000, dspark_n_routed_experts=8)
    pallas = dataclasses.replace(REFERENCE, implementation="pallas")
    plain, packed = (memory_plan(released, CACHE, numerics) for numerics in (REFERENCE, pallas))
    experts = 8 * 3 * 5120 * 2304 * 17 // 32
    assert plain.packing == 0 and packed.packing > experts
    assert packed.total == packed.weights + packed.tables + packed.packing
    assert "packing" in packed.table() and "packing" not in plain.table()
    # As many bytes of experts; their tops, and projections in three parts of bfloat16 instead of one of float32.
    assert plain.weights < packed.weights < 1.01 * plain.weights
    many = memory_plan(released, dataclasses.replace(CACHE, pages=100_000), pallas)
    assert many.total == many.weights + many.tables + many.pages + many.windows + many.sampling > packed.total


def test_each_device_holds_its_part_of_the_experts_and_a_whole_rank(cfg, monkeypatch):
    """From shapes: eight devices there need not be."""
    set_free(monkeypatch, None)
    one = memory_plan(cfg, CACHE, REFERENCE)
    layout = Layout(abstract_mesh(2), expert_parallel())
    two = memory_plan(cfg, CACHE, REFERENCE, layout)
    parts = bytes_per_device(cfg, expert_parallel(), 2)
    assert two.tables == parts["Engram tables"] == -(-one.tables // 2)
    assert two.weights == sum(parts.values()) - two.tables < one.weights
    assert (two.pages, two.windows, two.sampling) == (one.pages, one.windows, one.sampling)


def test_devices_without_memory_of_their_own_share_the_host(cfg, monkeypatch):
    free = {"first": 5 << 30, "second": 3 << 30}
    monkeypatch.setattr(module, "available_device_memory", free.get)
    monkeypatch.setattr(module, "available_host_memory", lambda: 9 << 30)
    monkeypatch.setattr(module, "_local_devices", lambda layout: ["first", "second"])
    assert memory_plan(cfg, CACHE, REFERENCE).free == 3 << 30
    free["first"] = None
    assert memory_plan(cfg, CACHE, REFERENCE).free == 9 << 29
