"""The report of a run, or of several compared: one self-contained HTML page, made of what their steps left."""

from affinage.report.facts import Facts, collect_facts
from affinage.report.page import render, write_report

__all__ = ["Facts", "collect_facts", "render", "write_report"]
