"""Hardware files, what steps cost by them, and the planner that ranks deployments by that."""
