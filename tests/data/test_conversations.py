"""Lines of conversations and of pairs in published forms, in files of all kinds, and what is refused."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from affinage.config.training import SftSettings
from affinage.data.conversations import open_source, parse_pair, read_examples
from affinage.data_check import check_conversations
from affinage.errors import UserError, UserWarned
from run_affinage import refused
from source_forms import write_lines

QUESTION, ANSWER, WORSE = ({"role": role, "content": text} for role, text in
                           (("user", "q"), ("assistant", "a"), ("assistant", "b")))  # fmt: skip
TALK = [QUESTION, ANSWER]
SAID = [{"from": who, "value": text} for who, text in (("human", "q"), ("gpt", "a"), ("gpt", "b"))]
SYSTEM = {"role": "system", "content": "x"}


def read(place: Path | str, key: str = "path") -> Iterator[list[dict]]:
    """The messages of every conversation in files or a data set."""
    settings = SftSettings.model_validate({"steps": 1, "sources": [{key: str(place)}]})
    source, parts = open_source(settings.sources[0], settings)
    for part in parts:
        for line in read_examples(part, source):
            if isinstance(line, UserError):
                raise line
            yield line.messages


READ = [
    *((item, TALK) for item in (
        {"messages": TALK},
        {"messages": [{**message, "tool_calls": None, "thinking": None} for message in TALK]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
        {"conversations": SAID[:2]},
        {"prompt": "q", "completion": "a"},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "context": "", "response": "a"},
    )),
    ({"messages": [{"role": "developer", "content": "x"}, *TALK]}, [SYSTEM, *TALK]),
    ({"system_prompt": "x", "prompt": "q", "response": "a"}, [SYSTEM, *TALK]),
    *(({"messages": [QUESTION, {**ANSWER, **flag}]}, [QUESTION, {**ANSWER, "train": False}])
      for flag in ({"weight": 0}, {"train": False}, {"loss": 0.0}, {"training": "no"}, {"weight": "0.0"})),
    ({"instruction": "Put.", "input": "cafe\u0301\r\nriver", "output": "a", "history": [["q", "a"]]},
     [*TALK, {"role": "user", "content": "Put.\n\ncafé\nriver"}, ANSWER]),
    *(({"messages": [QUESTION, {**ANSWER, key: "cafe\u0301\r\n"}]},
       [QUESTION, {**ANSWER, "reasoning_content": "café\n"}])
      for key in ("reasoning_content", "thinking", "reasoning")),
]  # fmt: skip


def test_published_forms_are_read_and_their_text_is_normalized(tmp_path: Path):
    path = write_lines(tmp_path / "c.jsonl", [item for item, _ in READ])
    assert list(read(path)) == [messages for _, messages in READ]


def test_files_may_be_compressed_or_tables_or_folders_of_data_sets(tmp_path: Path):
    talks = [[{**QUESTION, "content": f"q{i}"}, ANSWER] for i in range(3)]
    lines = "".join(json.dumps({"id": i, "messages": talk}) + "\n" for i, talk in enumerate(talks)).encode()
    for name, compress in (("a.jsonl", bytes), ("b.jsonl.gz", gzip.compress), ("c.jsonl.zst", zstandard.compress)):
        (tmp_path / name).write_bytes(compress(lines))
    pq.write_table(pa.table({"messages": talks}), tmp_path / "d.parquet")
    (tmp_path / "e.json").write_text("[]")
    with pytest.warns(UserWarned, match=r"e\.json"):
        assert list(read(tmp_path)) == talks * 4
    assert len(list(read(tmp_path / "[ab].jsonl*"))) == 6
    (tmp_path / "set").mkdir()
    (tmp_path / "d.parquet").rename(tmp_path / "set/train-00000-of-00001.parquet")
    assert list(read(tmp_path / "set", key="dataset")) == talks


CALL = {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
NO_TEXT = [{"type": "image", "url": "x"}, {"type": "text"}, {"type": "text", "text": None}, {"text": "y"}, "y"]
BAD = [
    {"text": "x"},
    {"messages": []},
    {"messages": [QUESTION, SYSTEM]},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"prompt": "x", "completion": None},
    *({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]} for part in NO_TEXT),
    {"messages": [{"role": "user", "content": "x", "reasoning": ["y"]}]},
    {"messages": [*TALK, CALL]},
    {"conversations": [{"from": "gpt", "value": "", "function_call": {"name": "f"}}]},
]


@pytest.mark.parametrize("line", ["{broken", "[1]", *map(json.dumps, BAD)])
def test_a_bad_line_is_refused_by_number(tmp_path: Path, line: str):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n\n" + line + "\n")
    error = refused(lambda: list(read(path)))
    assert error.where == f"{path}#3" and "line 1" not in str(error)


@pytest.mark.parametrize("name", ["none*.jsonl", "a.jsonl.gz", "b.jsonl", "c"])
def test_missing_and_damaged_files_are_refused(tmp_path: Path, name: str):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps({"messages": TALK}).encode() * 100)[:-20])
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    (tmp_path / "c").mkdir()
    assert name in refused(lambda: list(read(tmp_path / name))).where


def test_two_sources_of_one_name_are_refused_beside_a_mixture(tmp_path: Path):
    write_lines(tmp_path / "a.jsonl", [{"messages": TALK}])
    alike = {"steps": 1, "sources": [{"path": str(tmp_path / "a.jsonl"), "name": "talk"}] * 2}
    plain, mixed = (SftSettings.model_validate(alike | more) for more in ({}, {"mixture": {"talk": 1}}))
    check_conversations(plain, 1)
    check_conversations(mixed, 0)
    refused(check_conversations, mixed, 1, match="talk")


PAIRS = [
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WORSE]},
    {"prompt": "q", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WORSE]},  # they begin with it
    {"prompt": "q", "chosen": [QUESTION, ANSWER], "rejected": "b"},
    {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WORSE]},
    {"prompt": " q\n", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WORSE]},  # with white space around it
    {"instruction": "q", "input": "", "output": "x", "chosen": "a", "rejected": "b"},
    {"messages": [QUESTION], "chosen": ANSWER, "rejected": WORSE},
    {"conversations": SAID[:1], "chosen": SAID[1], "rejected": SAID[2]},
]


@pytest.mark.parametrize("item", PAIRS)
def test_pairs_of_published_forms_are_read(item: dict):
    pair, asked = parse_pair(item, ""), {**QUESTION, "train": False}
    assert (pair.talks, pair.prompt) == ([[asked, ANSWER], [asked, WORSE]], 1)
    pair, system = parse_pair(item | {"system": "x"}, ""), {**SYSTEM, "train": False}
    assert (pair.talks, pair.prompt) == ([[system, asked, ANSWER], [system, asked, WORSE]], 2)
    assert "prompt" not in item or parse_pair(item | {"prompt": [SYSTEM, QUESTION]}, "") == pair


@pytest.mark.parametrize("rest", [{"prompt": "q"}, {"prompt": "q", "rejected": None}, {"rejected": "b"}], ids=str)
def test_a_line_that_is_no_pair_is_refused(rest: dict):
    refused(parse_pair, {"chosen": "a"} | rest, "")
