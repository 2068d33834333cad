"""Experiments on the step functions alone: cases, times and floors by stage, prefill, exchanges, drafts, routing."""
