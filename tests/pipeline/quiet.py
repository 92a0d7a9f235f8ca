"""Whoever watches a run and says nothing."""


class Quiet:
    """Keeps which stages began and ended."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_begin(self, step):
        self.events.append(f"began {step.name}")

    def on_progress(self, what): ...

    def on_metrics(self, row): ...

    def on_end(self, step, result, seconds):
        self.events.append(f"ended {step.name}")
