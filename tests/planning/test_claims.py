"""The claims of Julian-600M's paper: every contradiction is found, with its figures."""

from affinage.config.load import load_recipe
from affinage.config.recipe import Claims
from affinage.planning.plan import contradictions, facts_of, planned_graph


def published():
    loaded = load_recipe("julian-600m-as-published")
    recipe = loaded.recipe
    facts = facts_of(planned_graph(loaded), recipe.pretrain, recipe.pretrain.batch_size, recipe.packing.seq_len)
    return facts, recipe.claims


FIGURES = {
    "tokens": "300,000 | 1,024 | 2,048 | 629.1B | not 39B | 39.32B | 64 sequences | 4 on each of the 16",
    "flops": "600M | 39B | 1.4e+20 | not 2.4e+19",
    "days": "38% | 0.97 days of a v4-32 | not 21 | 1.8% | 28% for 629.1B",
    "sources": "31.5B | not 39B",
    "sft.sources": "2.42M | not 2.47M",
    "compute_optimal": "65 tokens a parameter | over | 20 | not under",
    "sft.steps_per_epoch": "2.47M | 32 | 77,188 | not 45,383 | packing 1.7",
    "checkpoints": "10B | 100,000 | 170,000 | 64 × 2,048 | 76,2",
}


def test_every_contradiction_of_the_paper_is_named_with_its_figures():
    named = dict(contradictions(*published()))
    assert named.keys() == FIGURES.keys()
    for claim, figures in FIGURES.items():
        assert all(figure in named[claim] for figure in figures.split(" | ")), named[claim]


def test_what_is_consistent_is_not_complained_of():
    facts, _ = published()
    true = Claims(
        parameters=facts.parameters,
        tokens=facts.tokens,
        sources={"a": facts.tokens / 2, "b": facts.tokens / 4},
        epochs=4 / 3,
        flops=facts.flops_by_rule,
        mfu=0.4,
        slice="v4-32",
        days=facts.flops_by_rule / (0.4 * 16 * 275e12) / 86_400,
        compute_optimal=("over",),
    )
    assert not [*contradictions(facts, true)]
    assert [*dict(contradictions(facts, true.model_copy(update={"epochs": 1.0})))] == ["epochs"]
