"""dsv4jax: DeepSeek-V4.1-Flash inference in JAX."""

__version__ = "0.1.0"
