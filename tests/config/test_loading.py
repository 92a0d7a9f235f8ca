"""Recipes: what is merged from where, which mistakes are named at which line, and what YAML words mean."""

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from affinage.config.load import load_recipe, packaged_recipes
from affinage.config.recipe import Recipe
from affinage.config.training import SftSettings
from affinage.config.yaml import as_yaml, parse
from affinage.errors import UserError
from affinage.model.graph import parse as parse_graph
from affinage.planning.plan import training_settings
from affinage.registry import load_plugins
from affinage.secrets import masked
from run_affinage import refused

GOOD = """\
name: small
model:
  inputs: [tokens]
  nodes:
    embed: {kind: embedding, in: tokens}
data:
  sources: [pocket-world, {path: novels/, language: fr}]
  dedup: {threshold: 0.9}
pretrain:
  steps: 1_000
  batch_size: 8
  schedule:
    peak_lr: 1e-3
    min_lr: 1e-4
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "r.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return Path(name)

    return write


ONE, SCHEDULE = "name: small\n", "  schedule:\n    peak_lr: 1e-3\n    min_lr: 1e-4"
# What is replaced by what, the line that the message names, and what of the setting and its cure it holds.
MISTAKES = [
    ("batch_size: 8", "bacth_size: 8", 11, "`pretrain.bacth_size` | `pretrain.batch_size`"),
    ("steps: 1_000", "steps: many", 10, "`pretrain.steps` | `many` | integer"),
    ("threshold: 0.9", "threshold: [1]", 8, "`data.dedup.threshold` | a list"),
    ("language: fr", "langage: fr", 7, "`data.sources.1.langage` | `data.sources.1.language`"),
    (ONE, "seed: 1\n", 1, "`name`"),
    ("batch_size: 8", "batch_size: 8\n  gradient_accumulation_steps: 3", 9, "batch_size 8 | 3 gradient"),
    (ONE, ONE + "mesh: {dta: 2}\n", 2, "`mesh.dta` | `mesh.data`"),
    (ONE, ONE + "report: {language: de}\n", 2, "report.language | 'en' or 'fr'"),
    (ONE, ONE + "parallel: {remat: {kep: [query]}}\n", 2, "`parallel.remat.kep` | `parallel.remat.keep`"),
    (ONE, ONE + "name: large\n", 2, "duplicate key | name"),
    (ONE, ONE + "base: none.yaml\n", 2, "base: none.yaml | `r.yaml`"),
    (ONE, ONE + "base: r.yaml\n", 2, "r.yaml -> r.yaml"),
    (ONE, ONE + "runtime:\n  profile: 20-25\n", 3, "`runtime.profile` | a list"),
    (ONE, ONE + "runtime:\n  profile: [0, 10]\n", 3, "`runtime.profile.0` | greater than 0"),
    (ONE, "name: !!python/name:os.system x\n", 1, "not allowed"),
    (SCHEDULE, "  schedule: x", 12, "pretrain.schedule | `x` | name, peak_lr"),
    ("  batch_size: 8", "\tbatch_size: 8", 11, "not valid YAML | tabs"),
    (ONE, "name: a/b\n", 1, "`name` | `a/b` | slash"),
    ("peak_lr: 1e-3", "peak_lr: .inf", 13, "peak_lr | finite"),
    ("peak_lr: 1e-3", "peak_lr: 1e-5", 12, "pretrain.schedule | min_lr 0.0001 | peak_lr 1e-05"),
    ("peak_lr: 1e-3", "peak_lr: true", 13, "peak_lr | `true` | a number"),
    ("steps: 1_000", "steps: 1_000\n  monitor: {on_regression: stop}", 9, "pretrain | monitor.on_regression | `log`"),
    ("steps: 1_000", "steps:", 10, "`pretrain.steps` is empty | no default"),
    ("steps: 1_000", "tokens: 2M", 10, "`2M` | Write 2e6"),
    ("dedup: {threshold: 0.9}", "filters:", 8, "Leave it out | min_alnum_ratio: 0"),
    ("dedup: {threshold: 0.9}", "languages: en, fr", 8, "`data.languages` | Write [en, fr]"),
    ("{kind: embedding", "&a {kind: embedding", 5, "anchors"),
    (ONE, ONE + "mesh: {data:1}\n", 2, "`data:1` | space"),  # which makes a key that null would remove
]


@pytest.mark.parametrize(("good", "bad", "line", "held"), MISTAKES, ids=[bad.strip() for _, bad, *_ in MISTAKES])
def test_each_mistake_names_its_line_its_setting_and_its_cure(write: Write, good: str, bad: str, line: int, held: str):
    assert good in GOOD
    message = str(refused(load_recipe, write(GOOD.replace(good, bad))))
    assert f"r.yaml:{line}: " in message
    assert [each for each in held.split(" | ") if each not in message] == [], message
    assert "mistakes" not in message, "it is one, not several"


def test_what_is_no_recipe_is_refused_by_one_message(write: Write, tmp_path: Path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.yaml").mkdir()
    texts = enumerate(["- a\n", "", "quickstart", "\0", "note: " + "x" * 10**7])
    written = [write(text, f"{number}.yaml") for number, text in texts]
    for name in (*written, "binary.yaml", "folder.yaml", "none.yaml", "no/such/recipe", "x" * 5000):
        assert refused(load_recipe, name).what.strip() and len(str(refused(load_recipe, name))) < 12_000, name
    assert refused(load_recipe, "none.yaml").fix and "bytes" in refused(load_recipe, "4.yaml").what
    write("base: b.yaml\n", "a.yaml")
    assert "b.yaml -> a.yaml -> b.yaml" in str(refused(load_recipe, write("base: a.yaml\n", "b.yaml")))
    assert "`quickstart`" in refused(load_recipe, "quickstrat").fix


def test_a_run_of_another_version_opens_without_what_is_gone(write: Write, tmp_path: Path):
    recipe = json.loads(load_recipe("quickstart").recipe.model_dump_json())
    gone: list[str] = []
    whole = load_recipe(write(json.dumps(recipe), "recipe.json"), left_out=gone)
    assert whole.recipe == load_recipe("quickstart").recipe and not gone
    file = write(json.dumps(recipe | {"dpo": None}), "recipe.json")
    alone = refused(lambda: load_recipe(file, ["dpo.steps=100"], left_out=[]))
    assert "--set dpo" in str(alone), "what was just given is not left out"
    recipe["pretrain"]["colour"] = recipe["shade"] = 1
    recipe["sft"]["ema"] = {"keep": 0.9}  # all of it had other names
    recipe["tokenizer"]["kind"] = "characters"
    loaded = load_recipe(write(json.dumps(recipe), "recipe.json"), left_out=gone)
    assert sorted(gone) == ["pretrain.colour", "sft.ema", "sft.ema.keep", "shade", "tokenizer.kind"]
    assert loaded.recipe.pretrain == load_recipe("quickstart").recipe.pretrain


def test_all_mistakes_are_told_at_once(write: Write):
    bad = GOOD.replace("batch_size: 8", "batch_size: x").replace("threshold", "treshold").replace("small", "3.5")
    lines = [line for line in str(refused(load_recipe, write(bad))).splitlines() if line.startswith("r.yaml:")]
    assert {line.split(":")[1] for line in lines} == {"1", "8", "11"}


# What is given by `--set`, and what the message names.
OVERRIDES = [
    ("pretrain.stesp=7", "--set pretrain.stesp: | `pretrain.steps`"),
    ("pretrain.steps=[", "--set pretrain.steps:1:"),
    ("pretrain.steps", "--set pretrain.steps: | `key=value`"),
    ("xyzzy=1", "name, description"),
    ("hardware.price=free", "`hardware.price` | `free` | number"),
    ("runtime.trackers=[{wandb: {}}]", "--set runtime.trackers: | is a list | a mapping"),
    ("pretrain.mixture=[{from_step: 5, weights: {en: 1}}]", "pretrain.mixture | [5]"),
    ("pretrain.optimizer={b2: 0.999, state_dtype: bfloat16}", "pretrain | b2 of 0.999 | up to 0.99"),
    ("mesh={data:1, fsdp: 1}", "--set mesh: | `data:1` | space"),
]


@pytest.mark.parametrize(("override", "held"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_a_wrong_override_names_its_place_and_its_cure(write: Write, override: str, held: str):
    message = f"{refused(load_recipe, write(GOOD), [override])}\n"
    assert [each for each in held.split(" | ") if each not in message] == [], message
    assert "mistakes" not in message, "it is one, not several"


def test_overrides_lie_over_the_file_and_are_named_in_errors(write: Write):
    path = write(GOOD)
    written = load_recipe(path)
    assert written.recipe.data.sources[0].path == "pocket-world"
    assert written.locate(("data", "sources", 1, "language")) == "r.yaml:7"
    assert written.locate(("pretrain", "optimizer", "b1")) == "r.yaml:9", "unwritten: the nearest thing around it"
    loaded = load_recipe(path, ["pretrain.steps=7", "data.sources=[mine/, {path: x}]"])
    assert (loaded.recipe.pretrain.steps, loaded.recipe.pretrain.batch_size) == (7, 8), "the rest of the section stays"
    assert [source.path for source in loaded.recipe.data.sources] == ["mine/", "x"]
    assert loaded.locate(("data", "sources", 1, "path")) == "--set data.sources"
    merged = load_recipe(path, ["pretrain={steps: 5, schedule: {peak_lr: 2.0e-3}}"])
    assert (merged.recipe.pretrain.batch_size, merged.recipe.pretrain.schedule.min_lr) == (8, 1e-4), "mappings merge"
    assert {merged.locate(("pretrain", *keys)) for keys in (["schedule", "peak_lr"], ["steps"])} == {"--set pretrain"}
    assert merged.locate(("pretrain", "schedule", "min_lr")) == "r.yaml:14"


def test_a_base_is_merged_and_null_takes_away(write: Write):
    write(GOOD, "base.yaml")
    child = write(
        "base: base.yaml\nname: child\npretrain: {steps: 9}\n"
        "data: {sources: [a], dedup: null}\nmodel: {nodes: {embed: null, other: {kind: x}}}\n"
    )
    loaded = load_recipe(child)
    recipe = loaded.recipe
    assert (recipe.name, recipe.pretrain.steps, recipe.pretrain.batch_size) == ("child", 9, 8)
    assert len(recipe.data.sources) == 1 and recipe.data.dedup is None, "lists are replaced; null is a value"
    assert recipe.model["nodes"] == {"other": {"kind": "x"}}
    assert loaded.locate(("pretrain", "batch_size")) == "base.yaml:11"
    assert loaded.locate(("pretrain", "steps")) == "r.yaml:3"
    assert load_recipe(child, ["pretrain=null"]).recipe.pretrain is None
    assert load_recipe(child, ["pretrain.optimizer.max_grad_norm=null"]).recipe.pretrain.optimizer.max_grad_norm is None
    write(GOOD.replace("batch_size: 8", "batch_size: no"), "base.yaml")
    assert refused(load_recipe, child).where == "base.yaml:11"
    # The description of a base is not that of another recipe, and a mistake is not where null removed what it wrote.
    mine = load_recipe(write("base: quickstart\nname: mine\ndata: {sources: [mine/]}\n")).recipe
    assert not mine.description and mine.report.prompts
    write("base: quickstart\nname: none\nsft: null\n", "none.yaml")
    assert refused(load_recipe, write("base: none.yaml\nname: tuned\nsft: {steps: 10}\n")).where == "r.yaml:3"


def test_what_training_says_is_said_for_every_training(write: Write):
    sft = "sft: {sources: [chats], steps: 100, schedule: {peak_lr: 1e-4, min_lr: 0}}\n"
    path = write(GOOD.replace("  batch_size: 8\n", "") + sft + "training:\n  batch_size: 4\n  optimizer: {b2: 0.9}\n")
    loaded = load_recipe(path, ["sft.optimizer.b2=0.8", "sft.per_device_batch_size=2"])
    pretrain, sft = loaded.recipe.pretrain, loaded.recipe.sft
    assert (pretrain.batch_size, pretrain.optimizer.b2, pretrain.optimizer.weight_decay) == (4, 0.9, 0.1)
    assert (sft.batch_size, sft.per_device_batch_size, sft.optimizer.b2) == (None, 2, 0.8)
    assert loaded.locate(("pretrain", "batch_size")) == "r.yaml:16"
    sft = load_recipe(path, ["sft.log_every=2", "training={log_every: 5,eval_every: 9}", "sft.eval_every=7"]).recipe.sft
    assert (sft.log_every, sft.eval_every, sft.optimizer.weight_decay) == (5, 7, 0.01)
    wrong = str(refused(load_recipe, path, ["training.batchsize=4"]))
    assert wrong.startswith("--set training.batchsize: ") and "batch_size`" in wrong and "mistakes" not in wrong


def test_of_two_ways_to_say_one_thing_the_later_layer_wins(write: Write):
    write(GOOD, "base.yaml")
    child = write("base: base.yaml\nname: child\npretrain: {tokens: 1.0e+6, schedule: {warmup_ratio: 0.1}}\n")
    recipe = load_recipe(child, ["packing.seq_len=256"]).recipe
    assert recipe.pretrain.steps == 489 and recipe.pretrain_tokens == 489 * 8 * 256 >= 1e6, "rounded up to whole steps"
    assert load_recipe(child, ["pretrain.steps=5"]).recipe.pretrain.steps == 5
    devices = load_recipe(child, ["pretrain.per_device_batch_size=2", "pretrain.steps=5"]).recipe
    assert devices.pretrain.batch_size is None and devices.pretrain_tokens is None
    assert load_recipe(child, ["pretrain.schedule.warmup_steps=3"]).recipe.pretrain.schedule.warmup_ratio == 0
    each = ["pretrain.per_device_batch_size=2", "pretrain.schedule.warmup_steps=3"]
    assert "`batch_size`" in str(refused(load_recipe, child, each))
    both = GOOD.replace("steps: 1_000", "steps: 1_000\n  tokens: 1e6")
    assert "either `steps` or `tokens`" in str(refused(load_recipe, write(both, "both.yaml")))
    # A mixture is one, or of several stages.
    staged = "[{weights: {en: 1}}, {from_step: 10, weights: {en: 1, fr: 0.5}}]"
    for written, stages in (("{en: 7}", [(0, {"en": 7})]), (staged, [(0, {"en": 1}), (10, {"en": 1, "fr": 0.5})])):
        found = load_recipe("quickstart", [f"pretrain.mixture={written}"]).recipe.pretrain.mixture
        assert [(stage.from_step, stage.weights) for stage in found] == stages


def test_the_settings_in_effect_are_a_recipe_too_and_a_command_runs_it_again(write: Write, tmp_path: Path):
    loaded = load_recipe(write(GOOD), ["data.sources=[a b]"])
    (tmp_path / "recipe.json").write_text(loaded.recipe.model_dump_json())
    assert load_recipe("recipe.json").recipe == loaded.recipe
    assert loaded.command == "affinage run r.yaml --set 'data.sources=[a b]'"


def test_a_path_is_relative_to_the_file_that_says_it(write: Write, tmp_path: Path):
    for folder in ("base", "here", "plugins"):
        (tmp_path / folder).mkdir()
    write(GOOD + "init_from: .\nplugins: [mine.py]\n", "base/recipe.yaml")
    write("", "base/mine.py")
    derived = load_recipe(write("base: ../base/recipe.yaml\nname: derived\n", "here/r.yaml"))
    assert derived.beside(derived.recipe.init_from, ("init_from",)).resolve() == tmp_path / "base"
    assert derived.beside("mine.py", ("plugins", 0)).resolve() == tmp_path / "base/mine.py"
    own = load_recipe(write("base: ../base/recipe.yaml\ninit_from: .\n", "here/own.yaml"))
    assert own.beside(".", ("init_from",)).resolve() == tmp_path / "here"
    told = load_recipe("here/r.yaml", ["init_from=base"])
    assert told.beside("base", ("init_from",)).resolve() == tmp_path / "base", "not there beside the recipe: from here"


def test_what_is_not_said_is_as_in_julians_recipe():
    least, published = {"sources": ["chats.jsonl"], "steps": 30_000}, load_recipe("julian-sft").recipe
    given = SftSettings.model_validate(least)
    for name in ("batch_size", "schedule", "system_prompt", "num_epochs"):
        assert getattr(given, name) == getattr(published.sft, name), name
    moments = {"state_dtype": "bfloat16"}  # what a v4's memory asks for
    assert given.optimizer.model_copy(update=moments) == published.sft.optimizer
    # What a schedule does not say: a tenth of the rate, and of the steps.
    for schedule, wanted in (({"peak_lr": 1e-6}, (1e-6, 1e-7, 50)), ({"warmup_ratio": 0.2}, (2e-5, 2e-6, 100))):
        found = SftSettings.model_validate(least | {"steps": 500, "schedule": schedule}).schedule
        assert (found.peak_lr, found.min_lr, found.warmup(500)) == wanted
    shorter = {"name": "chat", "model": published.model, "sft": least, "packing": {"seq_len": 512}}
    assert training_settings(Recipe.model_validate(shorter))[::2] == ("sft", 512), "as in pretraining"


# ---- secrets


def test_what_is_a_secret_is_masked_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    for said, wanted in (
        ("cannot read https://ada:lovelace@host.org/x.parquet", "cannot read https://***@host.org/x.parquet"),
        ("GET https://b.org/f?X-Amz-Signature=0a1b&part=2", "GET https://b.org/f?X-Amz-Signature=***&part=2"),
        ("no access with hf_abcdefghijklmnopqrstuvwxyz", "no access with ***"),
        ("401 {'Authorization': 'Bearer abcdefgh'}", "401 {'Authorization': 'Bearer ***'}"),
        ("the key of the map, tokens=3 and s3://bucket/key/x", "the key of the map, tokens=3 and s3://bucket/key/x"),
    ):
        assert masked(said) == wanted == str(UserError(said))
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, f"of {name.lower()}")
        assert masked(f"<of {name.lower()}>") == "<***>"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/home/ada/key.json")  # a file, whose name is none
    assert masked("/home/ada/key.json is not there") == "/home/ada/key.json is not there"


@pytest.mark.parametrize("override", [
    "data.sources=['https://b.org/f.parquet?token=0a1b']",
    "data.sources=[{path: 'http://0a1b@127.0.0.1:8899/x.jsonl'}]",
    "runtime.trackers.mlflow={uri: 'http://u:p0a1b@127.0.0.1:5000'}",
    "description=hf_abcdefghijklmnopqrstuvwxyz",
])  # fmt: skip
def test_a_recipe_with_a_secret_is_refused_without_repeating_it(override: str):
    mistake = refused(load_recipe, "quickstart", [override])
    message = str(mistake)
    assert message.startswith(f"--set {override.partition('=')[0]}") and mistake.fix
    assert not [secret for secret in ("0a1b", "hf_abc") if secret in message]


# ---- what words and numbers mean, as pyyaml reads them too; what is printed is read back; any value anywhere


words = st.text("ab:- #'\"\n,é{}[]&*!%@`|>?~\\<=0123456789.e", max_size=12)
words |= st.sampled_from(["null", "True", "yes", "1e-5", "2026-01-02", "<<", "=", "0x10", "_", "a/b.c-d", "é"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text("ab:- #'é", min_size=1), inside, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(("text", "value"), [
    ("no", "no"), ("on", "on"), ("true", True), ("~", None), ("", None), ("1e-3", 1e-3), ("1.5e3", 1500.0),
    ("010", 10), ("50_000", 50000), ("12:30", "12:30"), ("2026-01-02", "2026-01-02"), ("'1'", "1"), (".5", 0.5),
    ("-.inf", float("-inf")), ("[a, 1]", ["a", 1]), ("1.", 1.0), ("1-2", "1-2"), ("_1", "_1"),
])  # fmt: skip
def test_words_and_numbers_are_what_a_person_means(text: str, value: object):
    assert parse(text, "t")[0] == value


@given(values)
def test_what_pyyaml_writes_and_what_is_printed_is_read_as_what_it_was(value: object):
    written = [as_yaml(value), yaml.dump(value, allow_unicode=True)]
    if re.search(r"\d[\d_]*e[-+]?\d", str(value)):  # no number to YAML 1.1, which pyyaml writes
        written.pop()
    for text in written if "<<" not in str(value) else ():  # a merge key is refused, quoted or not
        read = parse(text, "t")[0]
        assert read == value and type(read) is type(value)
        assert not isinstance(value, float) or math.copysign(1, read) == math.copysign(1, value)


RECIPES = {name: yaml.safe_load(file.read_text()) for name, file in packaged_recipes().items()}
WORDS = ["", "x", "../..", "~nobody/x", "a" * 5000, "\x00", "${HOME}", "auto", "null", "1e5", "0x10", "nan", "é"]
WORDS += ["http://[", "gs://"]
NUMBERS = [0, -1, 1, 3, 64, 10**9, 2**70, -(2**70), 0.5, 1e-9, 1e308, float("inf"), float("nan")]
ODD = [None, True, False, [], {}, [[]], [None], [1, "x", {}], {"": 1}, {1: 2}, {None: None}, {"a": {}}, b"abc"]
PIECES = b"&a |*a|!!python/name:os.system |{|[|: |- |\t|%|<<: |? |\xff|\x00|\r".split(b"|")


def places(value, path=()):
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def a_value(data: st.DataObject, file) -> None:
    found = copy.deepcopy(RECIPES[data.draw(st.sampled_from(sorted(RECIPES)))])
    *above, last = data.draw(st.sampled_from([path for path in places(found) if path]))
    within = found
    for key in above:
        within = within[key]
    within[last] = data.draw(st.sampled_from([*WORDS, *NUMBERS, *ODD]))
    file.write_text(yaml.dump(found, allow_unicode=True))


def some_bytes(data: st.DataObject, file) -> None:
    found = packaged_recipes()[data.draw(st.sampled_from(sorted(RECIPES)))].read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        at, gone = data.draw(st.integers(0, len(found) - 1)), data.draw(st.integers(0, 20))
        found = found[:at] + data.draw(st.sampled_from(PIECES)) + found[at + gone :]
    file.write_bytes(found)


@pytest.mark.parametrize("change", [a_value, some_bytes])
@pytest.mark.parametrize("examples", [25, pytest.param(600, marks=pytest.mark.full)])
def test_anything_anywhere(change, examples: int, tmp_path):
    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        change(data, tmp_path / "recipe.yaml")
        try:
            loaded = load_recipe(tmp_path / "recipe.yaml")
            load_plugins(loaded)
            parse_graph(loaded.recipe.model, vocabulary=100)
        except UserError as error:
            assert error.what.strip()

    check()
