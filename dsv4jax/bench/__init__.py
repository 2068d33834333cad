"""What `scripts/bench_steps.py` and its like are made of: random models and caches, cases, measurements and reports."""
