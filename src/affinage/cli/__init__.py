"""The command line: thin verbs over the rooms. Nothing heavy is imported before a verb needs it."""

from affinage.cli.program import main as main
