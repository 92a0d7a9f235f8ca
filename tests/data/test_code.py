"""Source code from its files to token rows: past language id, wrapped in ids that no text can forge."""

import numpy as np

from affinage.data.clean import clean
from affinage.data.collect import collect
from affinage.data.documents import DocumentWriter, read_documents
from affinage.data.rows import pack_rows
from affinage.data.special_tokens import BOS, CODE, ENDCODE, EOS, PAD
from affinage.recipe.cleaning import CleanSettings, GopherSettings
from affinage.recipe.data import DataSettings, RowsSettings
from source_forms import prose

CODE_TEXT = "def area(width, height):\n    # <|endcode|><|code|></s>\n    return [[width] * 3, {'h': height}]\n" * 3


def test_code_passes_cleaning_by_rules_of_its_own(tmp_path):
    (tmp_path / "src").mkdir()
    files = {
        "good.py": CODE_TEXT,
        "symbols.py": "+-*/ {} [] () <> == != ;; :: @@ ## && || ^^ ~~ ``\n" * 20,
        "minified.js": "var a=1;" * 500,
        "wide.py": ("x = call_of_something(with_an_argument, and_another_one) + " * 3 + "\n") * 5,
        "tiny.py": "x = 1\n",
    }
    for name, text in files.items():
        (tmp_path / "src" / name).write_text(text)
    (tmp_path / "text.txt").write_text(prose("en", 1) + "\n" + CODE_TEXT)
    (tmp_path / "symbols.txt").write_text(CODE_TEXT * 2)
    texts = [str(tmp_path / name) for name in ("text.txt", "symbols.txt")]
    sources = [{"path": str(tmp_path / "src"), "kind": "code"}, *texts]
    collect(DataSettings(sources=sources), tmp_path / "collected")
    settings = CleanSettings(gopher=GopherSettings())
    summary = clean(tmp_path / "collected", tmp_path / "clean", settings, ("en", "fr"))
    left = {row["id"]: row["language"] for batch in read_documents(tmp_path / "clean") for row in batch.to_pylist()}
    assert left.pop("good.py") == "code", "Gopher's rules for repetition are not for code"
    assert not {name for name, language in left.items() if language == "code"}
    removed = summary["removed"]
    assert [removed[f"code: {rule}"] for rule in ("a long line", "long lines", "not enough letters")] == [1, 1, 1]
    assert removed["too short"] == 1


def test_code_is_wrapped_in_the_rows(tmp_path, tokenizer):
    for part in ("train", "validation"):
        with DocumentWriter(tmp_path / "split" / part) as writer:
            writer.add(id="c", source="stack", language="code", text=CODE_TEXT)
            writer.add(id="t", source="web", language="en", text=CODE_TEXT)
    pack_rows(tmp_path / "split", tokenizer, tmp_path / "rows", RowsSettings(context=64), 0)

    def tokens(folder):
        (path,) = (tmp_path / "rows").glob(folder)
        rows = np.concatenate([np.load(file) for file in sorted(path.glob("rows-*.npy"))])
        if folder.startswith("validation"):  # a row begins with the last token of the row before it
            rows = np.concatenate([rows[0], *(row[1:] for row in rows[1:])])
        flat = rows.ravel()
        return flat[flat != PAD].tolist()

    text = tokenizer.encode(CODE_TEXT)
    assert not {CODE, ENDCODE, EOS} & set(text), "raw text never becomes a control id"
    for part in ("train", "validation"):
        assert tokens(f"{part}/*code") == [BOS, CODE, *text, ENDCODE, EOS]
        assert tokens(f"{part}/*en") == [BOS, *text, EOS]
    predicted = np.load(next((tmp_path / "rows" / "validation").glob("*code/bytes.npy")))
    assert predicted.sum() == len(CODE_TEXT.encode()), "bits per byte count the bytes of the text alone"
