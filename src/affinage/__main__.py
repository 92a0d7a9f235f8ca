"""`python -m affinage` is `affinage`."""

from affinage.stopping import die_with_parent

die_with_parent()

from affinage.cli import main  # noqa: E402 takes a moment

main()
