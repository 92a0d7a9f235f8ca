"""The head of the page: one sentence that says what the run made, and its few figures."""

from dataclasses import dataclass

from affinage.report.evaluations import Evaluation, Score
from affinage.report.facts import Facts
from affinage.report.quantities import Quantities
from affinage.report.sections import epochs

SCORES = 3  # listed in the sentence; of more tasks it gives the range


@dataclass(frozen=True)
class Headline:
    """One large figure with its name and a note."""

    label: str
    value: str
    note: str


def verdict(facts: Facts, words: dict[str, str], quantities: Quantities) -> str:
    """What was made, of how much text, in what time, and how good it is."""
    pretrain = facts.training("pretrain")
    if pretrain is None:
        opening = [words["verdict_data"]]
    else:
        opening = [words["verdict_model"].format(parameters=quantities.short(pretrain.parameters))]
        if pretrain.images:
            opening.append(words["verdict_images"].format(images=quantities.short(pretrain.images)))
        else:
            opening.append(words["verdict_tokens"].format(tokens=quantities.short(pretrain.tokens)))
        if facts.training("sft"):
            opening.append(words["verdict_sft"])
        if facts.training("dpo"):
            opening.append(words["verdict_dpo"])
    ending = []
    if facts.seconds is not None:
        ending.append(words["verdict_time"].format(time=quantities.duration(facts.seconds)))
    if pretrain and pretrain.devices:
        ending.append(words["verdict_devices"].format(devices=pretrain.devices))
    sentence = ", ".join([opening[0], _listed(opening[1:], words)] if opening[1:] else opening)
    sentence = " ".join(filter(None, [sentence, *ending])) + "."
    return " ".join(filter(None, [sentence, _scores(facts, words, quantities)]))


def _scores(facts: Facts, words: dict[str, str], quantities: Quantities) -> str:
    """The headline scores of the last model: all of a few, the lowest and the highest of many."""
    judged = [shares for shares in map(_shares, facts.evaluations) if shares]
    if not judged:
        return ""
    scores = sorted(judged[-1], key=lambda score: score.value)
    written = [f"{quantities.percent(one.value, 0)} ({one.task.replace('_', ' ')})" for one in scores]
    if len(written) <= SCORES:
        return words["verdict_scores"].format(scores=", ".join(written))
    return words["verdict_range"].format(count=len(written), low=written[0], high=written[-1])


def _listed(parts: list[str], words: dict[str, str]) -> str:
    return f" {words['and']} ".join(parts)


def _shares(evaluation: Evaluation) -> list[Score]:
    return [score for score in evaluation.scores if score.headline and score.is_share]


def headlines(
    facts: Facts, words: dict[str, str], quantities: Quantities, model_name: dict[str, str]
) -> list[Headline]:
    """The figures of the head; those that the run does not have are left out."""
    found = [*_of_data(facts, words, quantities), *_of_training(facts, words, quantities)]
    judged = [evaluation for evaluation in facts.evaluations if _shares(evaluation)]
    if judged:
        scores = [score.value for score in _shares(judged[-1])]
        name = model_name.get(judged[-1].model, judged[-1].model)
        note = words["over_tasks"].format(model=name, count=len(scores))
        found.append(Headline(words["mean_score"], quantities.percent(sum(scores) / len(scores)), note))
    if facts.seconds is not None:
        training = sum(t.seconds.get("total", 0.0) for t in facts.trainings)
        note = words["of_which_training"].format(time=quantities.duration(training)) if training else ""
        found.append(Headline(words["whole_run"], quantities.duration(facts.seconds), note))
    return found


def _of_data(facts: Facts, words: dict[str, str], quantities: Quantities) -> list[Headline]:
    if not facts.flows or not facts.flows[0].bytes_in or not facts.flows[-1].bytes_out:
        return []
    raw, kept = facts.flows[0].bytes_in, facts.flows[-1].bytes_out
    note = words["of_raw"].format(share=quantities.percent(kept / raw, 0), raw=quantities.bytes(raw))
    return [Headline(words["text_kept"], quantities.bytes(kept), note)]


def _of_training(facts: Facts, words: dict[str, str], quantities: Quantities) -> list[Headline]:
    pretrain = facts.training("pretrain")
    if pretrain is None:
        return []
    found = []
    if pretrain.parameters:
        found.append(
            Headline(words["parameters"], quantities.short(pretrain.parameters), quantities.count(pretrain.parameters))
        )
    if pretrain.tokens:
        seen, unique = epochs(facts), facts.rows.train.tokens if facts.rows else None
        note = words["epochs"].format(epochs=quantities.number(seen), unique=quantities.short(unique)) if seen else ""
        found.append(Headline(words["tokens_trained"], quantities.short(pretrain.tokens), note))
    if pretrain.images:
        seen, many = epochs(facts), quantities.count(facts.images)
        note = words["epochs"].format(epochs=quantities.number(seen), unique=many) if seen else ""
        found.append(Headline(words["images_seen"], quantities.short(pretrain.images), note))
    bits = [(v.name, v.bits_per_byte) for v in pretrain.validated if v.bits_per_byte is not None]
    if bits:
        one = words["on_one_validation"].format(name=bits[0][0])
        note = one if len(bits) == 1 else words["on_validation"].format(count=len(bits))
        mean = sum(value for _, value in bits) / len(bits)
        found.append(Headline(words["bits_per_byte"], quantities.decimal(mean), note))
    return found
