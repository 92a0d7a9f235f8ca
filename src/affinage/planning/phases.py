"""The planner's seconds of a step by its parts, as `affinage.training.breakdown` measures them."""

from affinage.planning.roofline import StepTime


def phases(time: StepTime, loss: str) -> dict[str, float]:
    """Seconds of forward, loss, backward and optimizer in one step; together they are the step.

    The loss is the node of that name, in both directions. A pipeline waits for a third of its bubble in the forward
    pass.
    """
    model = [node for node in time.nodes if node.name != loss]
    forward = sum(node.forward for node in model)
    return {
        "forward": forward + time.bubble / 3,
        "loss": sum(node.seconds for node in time.nodes if node.name == loss),
        "backward": sum(node.seconds for node in model) - forward + time.adding + 2 * time.bubble / 3,
        "optimizer": time.update,
    }
