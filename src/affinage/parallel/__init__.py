"""Parallel: a graph and a mesh become one compiled step."""
