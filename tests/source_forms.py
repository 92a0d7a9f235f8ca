"""Small sources of every form, written by the tests themselves, and what ingesting them gives."""

import bz2
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from affinage.cluster.executor import Executor
from affinage.config.data import DataSettings
from affinage.data.documents import DocumentWriter, read_documents
from affinage.data.ingest import ingest

WORDS = {
    "en": "the old bridge crosses a slow river where seven children sing about winter bread and cheese in the evening",
    "fr": "le vieux pont traverse une rivière lente où sept enfants chantent le pain et le fromage de l'hiver au soir",
}


def prose(language: str, number: int, sentences: int = 6) -> str:
    """Distinct text in a language, of about 100 characters a sentence."""
    words, lines = WORDS[language].split(), []
    for k in range(sentences):
        first = (number * 7 + k * 3) % len(words)
        lines.append(f"{' '.join(words[first:] + words[:first]).capitalize()} {number * 1009 + k * 31}.")
    return " ".join(lines)


def web_archive(pages: list[tuple[str, bytes, str, str]], *, gzipped: bool = True, headers: tuple = ()) -> bytes:
    """A WARC file of answers: (url, body, content type, status), each with the headers as well."""
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=gzipped)
    writer.write_record(writer.create_warcinfo_record("test.warc.gz", {"software": "test"}))
    for url, body, kind, status in pages:
        head = StatusAndHeaders(status, [("Content-Type", kind), *headers], protocol="HTTP/1.1")
        writer.write_record(writer.create_warc_record(url, "response", payload=io.BytesIO(body), http_headers=head))
    return out.getvalue()


def html(title: str, paragraphs: list[str]) -> bytes:
    body = "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    return (
        f"<html><head><title>{title}</title><style>p {{color: red}}</style><script>var hidden = 1;</script></head>"
        f"<body><nav><a href='/'>Home</a> <a href='/about'>About us</a></nav><main><h1>{title}</h1>{body}</main>"
        "<footer>All rights reserved</footer></body></html>"
    ).encode()


def page(id: int, title: str, text: str, *, ns: int = 0, redirect: bool = False) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    to = '<redirect title="Elsewhere" />' if redirect else ""
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{ns}</ns>\n    <id>{id}</id>\n    {to}\n    <revision>\n"
        f'      <id>{id}99</id>\n      <text xml:space="preserve">{escaped}</text>\n    </revision>\n  </page>\n'
    )


def dump_streams(language: str, groups: list[list[str]]) -> list[bytes]:
    """The bzip2 streams of a multistream dump: the head, the groups of pages, the end."""
    names = {"fr": ("Fichier", "Catégorie"), "en": ("File", "Category")}[language]
    head = (
        f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="{language}">\n'
        f"  <siteinfo>\n    <sitename>Wikipédia</sitename>\n    <base>https://{language}.wikipedia.org/wiki/Main</base>\n"
        f'    <namespaces>\n      <namespace key="0" case="first-letter" />\n'
        f'      <namespace key="6" case="first-letter">{names[0]}</namespace>\n'
        f'      <namespace key="14" case="first-letter">{names[1]}</namespace>\n    </namespaces>\n  </siteinfo>\n'
    )
    return [bz2.compress(part.encode()) for part in (head, *map("".join, groups), "</mediawiki>\n")]


def book(number: int, language: str) -> str:
    """A book in the form of Project Gutenberg's plain text files."""
    heading, code = {"English": ("CHAPTER", "en"), "French": ("CHAPITRE", "fr")}[language]
    parts = "\n\n".join(f"{heading} {n}\n\n{prose(code, number * 50 + k)}" for k, n in enumerate(("I", "II", "III")))
    return (
        f"\ufeffThe Project Gutenberg eBook of A Tale\n\nTitle: A Tale\n\nAuthor: Nobody\n\n"
        f"Release date: May 1, 2001 [eBook #{number}]\n\nLanguage: {language}\n\n"
        f"*** START OF THE PROJECT GUTENBERG EBOOK A TALE ***\n\nProduced by Volunteers\n\n\nA TALE\n\nby Nobody\n\n"
        f"Contents\n\n{heading} I\n\n{heading} II\n\n\n{parts}\n\n\n"
        "*** END OF THE PROJECT GUTENBERG EBOOK A TALE ***\n\nUpdated editions will replace the previous one.\n"
    )


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """A folder of files, some of them in folders within it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return write_files(path.parent, {path.name: lines}) / path.name


def write_documents(folder: Path, rows: list[dict], files: int = 1) -> Path:
    """A folder of documents, every `files`-th of them in one file; they are named d0, d1... where they have no id."""
    for part in range(files):
        with DocumentWriter(folder, f"part-{part}") as writer:
            for k in range(part, len(rows), files):
                writer.add(**{"id": f"d{k}", "source": "s"} | rows[k])
    return folder


def split_of(folder: Path, train: Iterable[str], validation: Iterable[str] = (), language: str = "en") -> Path:
    """A split of texts of one source."""
    for part, texts in (("train", train), ("validation", validation)):
        write_documents(folder / part, [{"text": text, "language": language} for text in texts])
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(folder: Path) -> list[dict]:
    """All documents of a folder, in order."""
    return [row for batch in read_documents(folder) for row in batch.to_pylist()]


def collected(folder: Path, *sources, world=None, workers=None, **settings) -> tuple[dict, list[dict]]:
    """The summary and the documents of ingesting the sources into `folder`."""
    summary = ingest(DataSettings(sources=sources, **settings), folder, world, executor=Executor(workers))
    json.dumps(summary, ensure_ascii=False).encode()  # as it is written into the manifest
    return summary, rows_of(folder)
