"""Routing of a batch before and after its experts are rearranged."""

import dataclasses

import numpy as np
import pytest
from bench_scripts import run_script
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.balance.solver import Solver
from dsv4jax.bench.results.result import load
from dsv4jax.bench.steps.routing import balancedness_by_step, judged_steps, routing_lines


def skewed(steps: int) -> np.ndarray:
    """Eight experts of one layer, of which the first two, on one rank of four, get most tokens; 30 tokens of 2."""
    return np.tile(np.array([20, 20, 6, 4, 4, 2, 2, 2]), (steps, 1, 1))


def test_steps_are_judged_with_experts_where_they_were_and_where_the_solver_puts_them():
    rows = judged_steps(skewed(5), 3, Solver(4), slots_per_rank=2, experts_per_token=2)
    assert [row["step"] for row in rows] == [3, 4]
    for row in rows:
        # 15 of 40 with both on a rank; apart, each has a rank with one of the least.
        assert row["before"] == pytest.approx(15 / 40) and row["after"] == pytest.approx(15 / 22)
        assert 0.5 < row["control"] < 1 and row["moved"] > 0
    spare = judged_steps(skewed(5), 3, Solver(4), slots_per_rank=3, experts_per_token=2)
    assert spare[0]["after"] > rows[0]["after"]


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_balancedness_is_one_only_where_all_ranks_have_the_same(seed):
    loads = np.random.default_rng(seed).integers(1, 50, (3, 2, 8))
    owners = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    found = balancedness_by_step(loads, owners, 4)
    by_rank = loads.reshape(3, 2, 4, 2).sum(-1)
    np.testing.assert_allclose(found, (by_rank.mean(-1) / by_rank.max(-1)).mean(-1))
    assert (found <= 1).all() and (balancedness_by_step(np.ones_like(loads), owners, 4) == 1).all()


@pytest.mark.parametrize("recorded", [0, 5])
def test_without_steps_on_both_sides_nothing_is_judged(recorded):
    with pytest.raises(ValueError, match=f"recorded = {recorded}: must be from 1 to 4"):
        judged_steps(skewed(5), recorded, Solver(4), slots_per_rank=2, experts_per_token=2)


@dataclasses.dataclass(frozen=True)
class FakeCase:
    """Loads by the routing alone; the model itself fails."""

    cfg: object
    numerics: object
    layout: object
    requests: int
    context: int
    fixed: tuple[int, ...]
    noise: str
    temperature: float
    steps: int

    def lower(self, way, params):
        raise AssertionError("not lowered here")

    def loads(self, program, params):
        if self.numerics.routing == "model":
            raise RuntimeError("out of memory")
        loads = skewed(self.steps) if self.numerics.routing == "skewed" else np.full((self.steps, 1, 8), 8)
        return {"target": np.tile(loads, 2), "draft": loads}


def test_the_script_reports_every_routing_of_target_and_draft(tmp_path, capsys):
    # The embedded model has 16 experts, its draft 8.
    replaced = {"DraftCase": FakeCase, "load_params": lambda *_: None, "compile_apart": dict.fromkeys}
    sizes = ["--recorded=2", "--judged=3", "--slots=4", "--draft_slots=2"]
    run_script("bench_routing", f"--report={tmp_path}", *sizes, **replaced)
    result = load(tmp_path / "routing.json")
    failed, *rows = result.rows["by_step"]
    assert failed == {"routing": "model", "error": "RuntimeError: out of memory"}
    told = [(row["routing"], row["stack"], row["step"]) for row in rows]
    assert told == [(r, s, n) for r in ("uniform", "skewed") for s in ("target", "draft") for n in (2, 3, 4)]
    assert all(row["before"] == 1 == row["after"] for row in rows if row["routing"] == "uniform")
    assert result.verdicts == routing_lines(rows) and len(result.verdicts) == 4
    skewed_draft = "skewed routing, draft: balancedness 0.375 before and 0.682 after rearranging;"
    assert result.verdicts[3].startswith(skewed_draft) and skewed_draft in capsys.readouterr().out
    assert "Balancedness of the draft, skewed routing" in (tmp_path / "routing.html").read_text()
