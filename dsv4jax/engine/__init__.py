"""The host side of serving: requests, scheduling, pages, prefix cache. Numpy only; it talks to an `Executor`."""
