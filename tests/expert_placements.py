"""Random placements of experts for property tests."""

from hypothesis import strategies as st

from sharding.placement import initial_owners


@st.composite
def sizes(draw):
    """(experts, ranks, slots per rank) that fit, the experts not always a multiple of the ranks."""
    ranks, experts = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    return experts, ranks, draw(st.integers(-(-experts // ranks), experts))


def random_owners(rng, experts, ranks, slots_per_rank):
    """Owners of one layer's slots: the initial ones after random swaps and replacements that keep them valid."""
    by_rank = initial_owners(1, experts, ranks, slots_per_rank).reshape(ranks, slots_per_rank)
    for _ in range(4 * by_rank.size):
        (r, s), (p, q) = rng.integers(ranks, size=2), rng.integers(slots_per_rank, size=2)
        a, b = by_rank[r, p], by_rank[s, q]
        if b not in by_rank[r] and a not in by_rank[s]:
            by_rank[r, p], by_rank[s, q] = b, a
        spare = rng.integers(experts)
        if (by_rank == by_rank[r, p]).sum() > 1 and spare not in by_rank[r]:
            by_rank[r, p] = spare
    return by_rank.reshape(-1)
