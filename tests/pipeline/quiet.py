"""Whoever watches a run and says nothing."""


class Quiet:
    """Keeps which stages began and ended."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def began(self, step, folder):
        self.events.append(f"began {step.stage.name}")

    def progressed(self, what): ...

    def measured(self, row): ...

    def ended(self, step, manifest):
        self.events.append(f"ended {step.stage.name}")
