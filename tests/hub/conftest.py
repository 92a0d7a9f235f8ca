"""The fixtures of these tests."""

from run_affinage import affinage  # noqa: F401
