"""Training of small models of this architecture. Nothing that serves a model imports it."""
