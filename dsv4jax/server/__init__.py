"""The OpenAI-compatible HTTP server: text on this side, token ids on the engine's."""
