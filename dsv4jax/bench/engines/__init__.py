"""Experiments through an engine: its host, its ranks, admission, drafts."""
