"""What a run made, in one line and in a few figures: of the report's head, the model card and the terminal."""

from dataclasses import dataclass

from affinage.report.evaluations import Evaluation, Score
from affinage.report.facts import Facts
from affinage.report.quantities import Quantities
from affinage.report.sections import epochs
from affinage.report.strings import spoken, strings

SCORES = 3  # listed in the sentence; of more tasks it gives the range


@dataclass(frozen=True)
class Headline:
    """One large figure with its name and a note."""

    label: str
    value: str
    note: str


def verdict(facts: Facts, language: str, *, timed: bool = True) -> str:
    """What was made, of how much text, in what time, and how good it is, in one line.

    Args:
        facts: of the run.
        language: "en" or "fr"; English for others.
        timed: whether to say how long the trainings took and on what; a card that must not change with them does not.
    """
    words, quantities = strings(language), Quantities(spoken(language))
    sentence = _made(facts, words, quantities)
    if timed:
        sentence = " ".join([sentence, *_spent(facts, words, quantities)])
    return " ".join(filter(None, [f"{sentence}.", _scores(facts, words, quantities)]))


def _made(facts: Facts, words: dict[str, str], quantities: Quantities) -> str:
    pretrain = facts.training("pretrain")
    if pretrain is not None:
        opening = words["verdict_model"].format(parameters=quantities.short(pretrain.parameters.total))
        trained = "verdict_tokens" if len(facts.trainings) == 1 else "verdict_pretrained"
        taught = [words[trained].format(tokens=quantities.short(pretrain.tokens))]
    elif facts.trainings:
        parameters = quantities.short(facts.trainings[-1].parameters.total)
        opening, taught = words["verdict_tuned"].format(parameters=parameters), []
    else:
        return words["verdict_data"]
    taught += [words[f"verdict_{name}"] for name in ("sft", "dpo") if facts.training(name)]
    return ", ".join([opening, _listed(taught, words)])


def _spent(facts: Facts, words: dict[str, str], quantities: Quantities) -> list[str]:
    """How long the trainings took, and on what; of a run without them, all its stages."""
    trained = [training.worked for training in facts.trainings if training.worked is not None]
    seconds = sum(trained) if trained else facts.seconds
    devices = next((str(training.devices) for training in facts.trainings if str(training.devices)), "")
    return [
        *([words["verdict_time"].format(time=quantities.duration(seconds))] if seconds is not None else []),
        *([words["verdict_devices"].format(devices=devices)] if devices else []),
    ]


def _scores(facts: Facts, words: dict[str, str], quantities: Quantities) -> str:
    """The headline scores of the last model: all of a few, the lowest and the highest of many."""
    judged = [shares for shares in map(_shares, facts.evaluations) if shares]
    if not judged:
        return ""
    scores = sorted(judged[-1], key=lambda score: score.value)
    written = [_written(one, words, quantities) for one in scores]
    if len(written) <= SCORES:
        return words["verdict_scores"].format(scores=", ".join(written))
    return words["verdict_range"].format(count=len(written), low=written[0], high=written[-1])


def _written(score: Score, words: dict[str, str], quantities: Quantities) -> str:
    told = [score.task.replace("_", " "), *([words["in_chat"]] if score.chat_template else [])]
    return f"{quantities.percent(score.value, 0)} ({', '.join(told)})"


def _listed(parts: list[str], words: dict[str, str]) -> str:
    return f" {words['and']} ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


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
        in_chat = sum(score.chat_template for score in _shares(judged[-1]))
        name = model_name.get(judged[-1].model, judged[-1].model)
        note = words["over_one_task" if len(scores) == 1 else "over_tasks"].format(model=name, count=len(scores))
        note += f" ({in_chat} {words['in_chat']})" if in_chat else ""
        found.append(Headline(words["mean_score"], quantities.percent(sum(scores) / len(scores)), note))
    if facts.seconds is not None:
        training = sum(t.worked or 0.0 for t in facts.trainings)
        note = words["of_which_training"].format(time=quantities.duration(training)) if training else ""
        found.append(Headline(words["whole_run"], quantities.duration(facts.seconds), note))
    return found


def _of_data(facts: Facts, words: dict[str, str], quantities: Quantities) -> list[Headline]:
    flows = list(facts.flows.values())
    if not flows or not (raw := flows[0].bytes_in) or not (kept := flows[-1].bytes_out):
        return []
    note = words["of_raw"].format(share=quantities.percent(kept / raw, 0), raw=quantities.bytes(raw))
    return [Headline(words["text_kept"], quantities.bytes(kept), note)]


def _of_training(facts: Facts, words: dict[str, str], quantities: Quantities) -> list[Headline]:
    pretrain = facts.training("pretrain")
    if pretrain is None:
        return []
    found = []
    if parameters := pretrain.parameters.total:
        found.append(Headline(words["parameters"], quantities.short(parameters), quantities.count(parameters)))
    if pretrain.tokens:
        seen, unique = epochs(facts), facts.rows.train.tokens if facts.rows else None
        note = words["epochs"].format(epochs=quantities.number(seen), unique=quantities.short(unique)) if seen else ""
        found.append(Headline(words["tokens_trained"], quantities.short(pretrain.tokens), note))
    bits = [(name, v.bits_per_byte) for name, v in pretrain.validation.items() if v.bits_per_byte is not None]
    if bits:
        one = words["on_one_validation"].format(name=bits[0][0])
        note = one if len(bits) == 1 else words["on_validation"].format(count=len(bits))
        mean = sum(value for _, value in bits) / len(bits)
        found.append(Headline(words["bits_per_byte"], quantities.decimal(mean), note))
    return found
