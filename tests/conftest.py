"""Strict settings for every test: eight CPU devices, rank promotion raises, no network."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",  # the tests compile much and compute little
    ]
)
os.environ.pop("COLUMNS", None)  # pytest-xdist gives its workers one, and tables would be folded to it
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import jax
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")

# Two slow cores run these tests: a deadline would only measure the machine, and CI must be repeatable.
settings.register_profile("affinage", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("affinage")
