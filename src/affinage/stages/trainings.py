"""The work of the training stages."""

from affinage.stages.stage import StageContext, Summary


def pretrain(context: StageContext) -> Summary:
    """Train the model from random weights on rows of documents."""
    return {}


def sft(context: StageContext) -> Summary:
    """Fine-tune the pretrained model on conversations."""
    return {}
