"""What tests of verbs share."""

from run_affinage import affinage  # noqa: F401
