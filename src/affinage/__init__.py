"""affinage: from raw text in two languages to a released, evaluated chat model, in JAX."""

__version__ = "0.1.0"
