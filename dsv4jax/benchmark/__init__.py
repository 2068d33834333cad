"""What `scripts/bench_steps.py` is made of: random models and caches, one rank of many on one device, and reports."""
