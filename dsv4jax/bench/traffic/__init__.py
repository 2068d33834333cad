"""Workloads and who runs them: sessions of agents, trace files, engines in this process, servers behind HTTP."""
