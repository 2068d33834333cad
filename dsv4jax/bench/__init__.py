"""Experiments: what is measured, beside which control, and what files and pages come of it (`docs/bench`).

Each package needs only those above it; a script in `scripts/` is an experiment made of them.

| | |
|---|---|
| `results` | **what an experiment writes** |
| `results.result` | result files: their fields, reading and writing, and tables as text |
| `results.conditions` | conditions without which numbers mean nothing |
| `results.plots`, `svg`, `tables`, `page` | declarations of plots, and how they, tables and pages are drawn |
| `results.comparison` | two sets of results, and which differences are larger than those of repeats |
| `results.verdicts` | sentences with the number that makes them true |
| `steps` | **step functions alone, on a device** |
| `steps.cases` | steps of some size: batches, programs, times |
| `steps.random_state` | random models and caches |
| `steps.costs`, `ceilings` | fewest bytes and operations of a step; the rates that a machine reaches |
| `steps.trace`, `stages` | kernels of a profile, and times by stage beside their floors |
| `steps.prefill`, `replacement` | whole prompts with one optimisation after the other |
| `steps.exchange` | exchanges between ranks beside plain collectives |
| `steps.drafts` | drafting and verifying with synthetic acceptance; reliability of confidences |
| `steps.routing` | how evenly loads fall on ranks |
| `traffic` | **requests, and how they are counted** |
| `traffic.records`, `counting` | what is known of a request; what a token per second, a latency and a valid run are |
| `traffic.agents`, `trace_file`, `sessions` | generated sessions, sessions in files, and sessions as a workload |
| `traffic.driver` | runs a workload through an engine in this process |
| `traffic.client`, `http_target` | runs it at a server, which is asked in one of several ways |
| `traffic.session_report` | rows, plots and verdicts of sessions |
| `engines` | **the engine around the steps** |
| `engines.system` | makes every engine that is measured, on the simulated executor or on a model |
| `engines.host_gap`, `host_cost` | decoding through the engine beside the step alone; the host's part by itself |
| `engines.admission` | the host's work for new requests; bursts, long prompts |
| `engines.ranks`, `rank_work` | ranks that wait for each other; what steps cost by what ranks do |
| `engines.placement` | the scheduler's policies over ranks |
| `engines.draft_rates` | tokens per second with fixed and with chosen numbers of drafts |
| `planning` | **a model of cost instead of a machine** (`docs/planner.md`) |
| `planning.hardware`, `calibrate` | constants of a machine, and how they are taken from measured steps |
| `planning.cost_model`, `published` | seconds of a step; beside published figures |
| `planning.planner`, `simulation` | which deployments meet targets; sessions on the real scheduler |
"""
