"""Expert balancing: recorded loads, placements of experts on ranks, and the moves between them while serving."""
