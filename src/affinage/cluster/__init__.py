"""The processes of a run on one or many machines: what they agree on, and how they are started."""
