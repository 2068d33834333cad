"""Agents' sessions on the real scheduler, with steps that take what the cost model says: what closed forms leave out.

One group of ranks does both prefill and decode. There is no pause between steps, no padding, and what drafts are
accepted is drawn from a law; see `cost_model` for the rest of what is assumed.
"""

import dataclasses

from dsv4jax.bench.engines.system import Sizes, simulated_system
from dsv4jax.bench.planning.cost_model import HardwareCost
from dsv4jax.bench.planning.planner import PAGE, Sweep, device_memory
from dsv4jax.bench.traffic.agents import AgentParameters, generate_sessions
from dsv4jax.bench.traffic.counting import Summary, Window, summarize
from dsv4jax.bench.traffic.driver import Run, run_engine
from dsv4jax.bench.traffic.sessions import SessionWorkload
from dsv4jax.engine.simulated import fixed_acceptance
from dsv4jax.quant import ceil_div

_IDS = range(300, 800)
"""Prompts are made from; which ids is not simulated."""
_WARM_UP = 0.1
"""Share of the time that does not count."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Sessions of `agents` for so many virtual seconds, `live` of them at a time.

    Args:
      slots: requests of a rank at a time.
      prefill_tokens: of a step and rank.
      acceptance: of drafts, by position; as many drafts are verified.

    Raises:
      ValueError: a value that is not allowed, by name.
    """

    live: int = 64
    seconds: float = 3600.0
    slots: int = 16
    prefill_tokens: int = 8192
    acceptance: tuple[float, ...] = (0.8, 0.7, 0.6, 0.5, 0.4)
    agents: AgentParameters = dataclasses.field(default_factory=AgentParameters)
    seed: int = 0

    def __post_init__(self):
        for name in ("live", "slots", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds = {self.seconds}: must be greater than 0")


def simulate(cost: HardwareCost, traffic: Traffic, sweep: Sweep, progress: bool = True) -> tuple[Run, Summary]:
    """Runs the traffic; what counts is all but its first tenth.

    The cache of a rank has the memory that weights, tables, slots and workspace leave (`sweep`), but no more pages than
    all slots have at full length.

    Raises:
      ValueError: the memory of a device does not hold the longest request.
    """
    cfg, draft = cost.cfg, len(traffic.acceptance) > 0
    memory = device_memory(cfg, cost.hardware, cost.ranks, traffic.slots, PAGE, draft, sweep)
    page = memory.pages // traffic.slots
    pages = (memory.usable - memory.total + memory.pages) // page
    length = traffic.agents.max_context
    if pages * PAGE < length:
        raise ValueError(
            f"pages = {max(0, pages)}: {memory.usable / 1e9:.0f} GB hold {max(0, pages) * PAGE} tokens beside the rest,"
            f" a request may have {length}"
        )
    sizes = Sizes(
        ranks=cost.ranks,
        slots=traffic.slots,
        max_model_len=length,
        prefill_tokens=traffic.prefill_tokens,
        pages=min(pages, traffic.slots * ceil_div(length, PAGE)),
        drafts=len(traffic.acceptance),
    )
    system = simulated_system(sizes, cost, fixed_acceptance(traffic.acceptance, traffic.seed))
    engine, executor = system.engine()
    sessions = SessionWorkload(
        generate_sessions(traffic.agents, traffic.seed),
        live=traffic.live,
        ids=_IDS,
        max_context=length,
        page_size=PAGE,
        replay_tokens=cfg.sliding_window,
    )
    run = run_engine(engine, executor, sessions, until=traffic.seconds, progress=progress)
    window = Window(_WARM_UP * run.ended, run.ended)
    return run, summarize(run.measurements, window, devices=cost.ranks)
