"""The work of the stages that judge and release what was trained."""

from affinage.stages.stage import StageContext, Summary


def evaluate_base(context: StageContext) -> Summary:
    """Judge the pretrained model."""
    return {}


def evaluate_sft(context: StageContext) -> Summary:
    """Judge the chat model."""
    return {}


def export(context: StageContext) -> Summary:
    """Write the Hugging Face folder of the last model."""
    return {}
