"""What decontamination looks for in a benchmark: every text of an item, and the question with its right answer."""

import json

import yaml

from affinage.evaluation.items import benchmark_items

LINES = [
    {"question": "Where is Paris?", "options": {"text": ["in France", "in Spain"], "n": 1}, "right": 0},
    {"question": "Where is Madrid?", "options": {"text": ["in France", "in Spain"], "n": 2}, "right": 1},
]
TASK = {
    "task": "capitals",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_choice": "{{options.text}}",
    "doc_to_target": "right",
}
CHAT = TASK | {"task": "chat", "output_type": "generate_until", "doc_to_target": "{{options.text[right]}}"}


def test_items_of_local_tasks(tmp_path):
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    for task in (TASK, {k: v for k, v in CHAT.items() if k != "doc_to_choice"}):
        (tmp_path / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    items = list(benchmark_items([str(tmp_path)]))
    assert [(item.benchmark, item.id) for item in items] == [(t, i) for t in ("capitals", "chat") for i in "01"]
    for item in items:
        asked = LINES[int(item.id)]
        answer = asked["options"]["text"][int(item.id)]
        assert set(item.texts) == {asked["question"], "in France", "in Spain", f"Q: {asked['question']}\nA: {answer}"}
