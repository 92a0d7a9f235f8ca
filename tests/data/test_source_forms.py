"""Web archives, Wikipedia dumps and Gutenberg books become documents with id, URL, language and licence."""

import bz2
import gzip
import lzma
import zlib

import pytest

from affinage.config.data import SourceSettings
from affinage.data.files import DamagedFile, Part, kind_of
from affinage.data.readers import BadRecord, read_records
from affinage.data.wikipedia import wikitext_to_text
from source_forms import book, collected, dump_streams, html, page, prose, web_archive, write_files, write_lines


def records(path, **settings):
    file = Part(str(path), path.name, kind_of(path.name), path.stat().st_size)
    return list(read_records(file, SourceSettings(path=str(path), **settings)))


PAGE = html("Bridges", [prose("en", 1), prose("en", 2)])
PAGES = [
    ("https://a.example/bridges", PAGE, "text/html", "200 OK"),
    ("https://a.example/logo.png", b"\x89PNG", "image/png", "200 OK"),
    ("https://a.example/gone", html("Gone", ["not here"]), "text/html", "404 Not Found"),
    ("https://a.example/fr", "<p>déjà la fenêtre</p>".encode("latin1"), "text/html; charset=latin1", "200 OK"),
]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_the_pages_of_a_web_archive_are_read_and_a_damaged_one_is_not(tmp_path, name):
    path, gzipped = tmp_path / name, name.endswith("gz")
    path.write_bytes(web_archive(PAGES, gzipped=gzipped))
    summary, rows = collected(tmp_path / "collected", {"path": str(path), "license": "unknown"})
    assert [row["url"] for row in rows] == ["https://a.example/bridges", "https://a.example/fr"]
    first = rows[0]["text"]
    assert f"{prose('en', 1)}\n" in first, "paragraphs stay apart"
    assert not [words for words in ("hidden", "color", "About us", "All rights") if words in first]
    assert rows[1]["text"].strip() == "déjà la fenêtre"
    assert len(rows[0]["id"]) == 36 and rows[0]["license"] == "unknown"
    assert summary["removed"] == {"not HTML": 1, "not found": 1}
    whole = web_archive(PAGES[:1], gzipped=gzipped)
    for content, message in ((whole[:-30], "cut off"), (whole[:-400], "cut off"), (b"hello world\n" * 100, None)):
        path.write_bytes(content)
        with pytest.raises(DamagedFile, match=message):
            records(path)


def archived(tmp_path, body: bytes, *headers: str):
    """What is read of an archive with one page, as its server sent it."""
    told = tuple(header.split(": ") for header in headers)
    archive = web_archive([("https://a.example", body, "text/html", "200 OK")], gzipped=False, headers=told)
    (tmp_path / "a.warc").write_bytes(archive)
    (record,) = records(tmp_path / "a.warc")
    return record


SENT = {
    "gzip": (gzip.compress(PAGE), "Content-Encoding: gzip"),
    "deflate": (zlib.compress(PAGE), "Content-Encoding: Deflate"),
    "plain-gzip": (PAGE, "Content-Encoding: gzip"),  # the archive has undone the coding, and kept the header
    "plain-chunked": (PAGE, "Transfer-Encoding: chunked"),
}


@pytest.mark.parametrize("form", SENT)
def test_a_page_is_read_as_it_was_before_it_was_sent(tmp_path, form):
    found = archived(tmp_path, *SENT[form]).text
    assert found == archived(tmp_path, PAGE).text and prose("en", 1) in found


def test_bodies_that_cannot_be_read_are_counted(tmp_path, monkeypatch):
    brotli = b"\x1b\x9f\x00\x00\xa4", "Content-Encoding: br"
    for body, coding in (brotli, (b"3\r\n<p>", "Transfer-Encoding: chunked")):
        found = archived(tmp_path, body, coding)
        assert isinstance(found, BadRecord) and found.reason == "unknown compression" and coding[-2:] in found.detail
    monkeypatch.setattr("affinage.data.readers.MAX_RECORD_BYTES", 10_000)
    found = archived(tmp_path, gzip.compress(bytes(1_000_000)), "Content-Encoding: gzip")
    assert isinstance(found, BadRecord) and found.reason == "too large"


WIKITEXT = """{{Infobox Pont|nom=X|image=y.jpg|texte={{lang|en|z}}}}
[[Fichier:Pont.jpg|thumb|Un [[pont]] vieux]]
'''Le Pont''' (; né le {{date|14|juillet|1789}} à [[Paris (ville)|Paris]]) est un ''pont''<ref>Une source</ref> du
{{s|XIX}}, et non du {{XIIe siècle}}, long de {{unité|5|km}} et de 3&times;2 arches ({{pasDeTexte}}).

== Histoire ==
* premier
# [[:Catégorie:Ponts|les ponts]] et [https://x.example un site]

{| class="wikitable"
! a
|-
| b
|}
<!-- un commentaire -->
=== Vide ===
<gallery>
a.jpg
</gallery>
== Notes et références ==
{{Références}}
== Liens externes ==
* [https://y.example Y]
[[Catégorie:Pont]]
[[en:Bridge]]
__NOTOC__"""


def test_wikitext_becomes_what_a_reader_reads():
    assert wikitext_to_text(WIKITEXT, {"fichier", "catégorie"}) == (
        "Le Pont (né le 14 juillet 1789 à Paris) est un pont du\n"
        "XIXe siècle, et non du XIIe siècle, long de 5 km et de 3×2 arches.\n\n"
        "Histoire\n\npremier\nles ponts et un site\n\nVide"
    )


TEMPLATES = {
    "le {{1er}} mai, le {{1er|juin}}, la {{2e|fois}}": "le 1er mai, le 1er juin, la 2e fois",
    "de {{formatnum:12345}} mots": "de 12345 mots",
    "le {{numéro|5}} ou n{{o|5}}": "le nº 5 ou nº 5",
    "aux {{s2|XVIII|XIX}}": "aux XVIIIe et XIXe siècles",
    "par {{Lien|Nom}} ou {{Lien|fr=Lui|trad=Him}}": "par Nom ou Lui",
    "{{nombre|1000|mots}} au XX{{e}}, le {{e|5}}, 5{{ème}}, M{{e|me}} X": "1000 mots au XXe, le 5e, 5e, Mme X",
    "avec {{M.|}} Dupont et {{M.|Martin}}": "avec M. Dupont et M. Martin",
    "about {{frac|1|1|2}} of {{lang-en|word}} or {{langx|en|text=two}}": "about 1 1/2 of word or two",
    "There are, {{as of|2010}}, ten{{nbsp}}km; {{quote|1=so it is}}": "There are, as of 2010, ten\u00a0km; so it is",
    "a {{unknown one|word}} in it": "a word in it",
    "Text. {{cite web|title=x|url=y}}\n{{Portail|Architecture}}": "Text.",
}


def test_templates_that_stand_for_words_are_read():
    assert {wikitext: wikitext_to_text(wikitext) for wikitext in TEMPLATES} == TEMPLATES


def test_broken_and_deeply_nested_wikitext_is_no_error():
    for wikitext in ("{{", "[[", "<ref>", "{|", "[[a|", "{{{1|x}}}", "{{a|" * 3_000 + "x" + "}}" * 3_000):
        assert isinstance(wikitext_to_text(wikitext), str)


REDIRECT = page(2, "Pont", "#REDIRECT [[Le Pont]]", redirect=True)
WINTER = page(4, "Été &amp; hiver", f"L'été. {prose('fr', 1)}")
TALK, EMPTY = page(3, "Discussion:Pont", "bla", ns=1), page(5, "Vide", "{{Ébauche}}")
GROUPS = [[page(1, "Le Pont", WIKITEXT), REDIRECT], [TALK, WINTER], [EMPTY]]


def test_a_multistream_dump(tmp_path):
    path = tmp_path / "frwiki-pages-articles-multistream1.xml-p1p306134.bz2"
    path.write_bytes(b"".join(dump_streams("fr", GROUPS)))
    summary, rows = collected(tmp_path / "collected", {"path": str(path), "name": "wikipedia"})
    base = "https://fr.wikipedia.org/wiki"
    urls = [(row["id"], row["url"]) for row in rows]
    assert urls == [("1", f"{base}/Le_Pont"), ("4", f"{base}/%C3%89t%C3%A9_%26_hiver")]
    assert rows[0]["text"].startswith("Le Pont\n\nLe Pont (né le 14 juillet")
    assert {(row["language"], row["license"]) for row in rows} == {("fr?", "cc-by-sa-4.0")}
    assert summary["removed"] == {"empty": 1}, "redirects and talk pages are no articles"


def test_dumps_of_other_compressions_and_damaged_ones(tmp_path):
    streams = dump_streams("fr", GROUPS)
    plain = bz2.decompress(b"".join(streams))
    damaged = {
        "cut.xml.bz2": b"".join(streams)[:-60],
        "ended.xml.bz2": b"".join(streams[:-1]),
        "other.xml": b"<feed></feed>",
        "garbled.xml.bz2": streams[0] + streams[1][:80] + b"\0" * 40 + streams[1][120:],
    }
    for suffix, compress in (("", bytes), (".xz", lzma.compress)):
        path = tmp_path / f"a.xml{suffix}"
        path.write_bytes(compress(plain))
        assert [record.id for record in records(path)] == ["1", "4", "5"]
        damaged[f"b.xml{suffix}"] = compress(plain[:-50])
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DamagedFile):
            records(tmp_path / name)


def test_a_book_is_cut_into_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("affinage.data.readers.PART_CHARACTERS", 500)
    (tmp_path / "pg12.txt").write_text(book(12, "French"))
    _, rows = collected(tmp_path / "collected", {"path": str(tmp_path / "pg12.txt"), "kind": "gutenberg"})
    assert [row["id"] for row in rows] == ["12#0", "12#1", "12#2"]
    assert rows[0]["text"].startswith("A TALE\n\nby Nobody\n\nContents") and rows[0]["text"].endswith(prose("fr", 600))
    assert rows[2]["text"] == f"CHAPITRE III\n\n{prose('fr', 602)}"
    facts = {(row["url"], row["license"]) for row in rows}
    assert facts == {("https://www.gutenberg.org/ebooks/12", "public domain in the USA (Project Gutenberg)")}


def test_old_books_of_any_charset_and_books_under_copyright(tmp_path):
    head = "The Project Gutenberg Etext of Un Conte\n\n[Etext #99]\n\nCharacter set encoding: {}\n\n"
    head += "*END THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n"
    body = f"Déjà l'été.\n\n{prose('fr', 1)}"
    for charset in ("ISO-8859-1", "rot13"):
        text = f"{head.format(charset)}{body}\n\nEnd of the Project Gutenberg Etext\n\n{'More of a license. ' * 900}\n"
        (tmp_path / "book.txt").write_bytes(text.encode("latin1"))
        (found,) = records(tmp_path / "book.txt", kind="gutenberg")
        assert found.id == "99#0" and found.text == body
    text = book(5, "English").replace("Title:", "** This is a COPYRIGHTED Project Gutenberg eBook **\n\nTitle:")
    (tmp_path / "5.txt").write_text(text)
    (found,) = records(tmp_path / "5.txt", kind="gutenberg")
    assert isinstance(found, BadRecord) and found.reason == "under copyright"


def test_code_is_what_a_source_says_is_code(tmp_path):
    files = {"a.py": "def f():\n    return 1\n", "Makefile": "all:\n\tmake it\n", "logo.png": "PNG"}
    source = {"path": str(write_files(tmp_path / "src", files)), "kind": "code"}
    summary, rows = collected(tmp_path / "collected", source)
    assert [(row["id"], row["language"]) for row in rows] == [("Makefile", "code"), ("a.py", "code")]
    assert summary["removed"] == {"unknown kind of file": 1}
    path = write_lines(tmp_path / "a.jsonl", [{"text": "Not code at all.", "language": "code"}])
    assert collected(tmp_path / "collected", str(path))[1][0]["language"] == "", "no document makes itself code"
