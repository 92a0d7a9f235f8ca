"""Web archives, Wikipedia dumps and Gutenberg books become documents with id, URL, language and licence."""

import pytest

from affinage.config.data import SourceSettings
from affinage.data.files import DamagedFile, SourceFile
from affinage.data.readers import read_records
from affinage.data.wikitext import wikitext_to_text
from source_forms import book, collected, dump_streams, html, page, prose, web_archive


def records(path, **settings):
    file = SourceFile(str(path), path.name, path.stat().st_size)
    return list(read_records(file, SourceSettings(path=str(path), **settings)))


def run(tmp_path, source):
    return collected(tmp_path / "collected", source)


PAGE = html("Bridges", [prose("en", 1), prose("en", 2)])
PAGES = [
    ("https://a.example/bridges", PAGE, "text/html", "200 OK"),
    ("https://a.example/logo.png", b"\x89PNG", "image/png", "200 OK"),
    ("https://a.example/gone", html("Gone", ["not here"]), "text/html", "404 Not Found"),
    ("https://a.example/fr", "<p>déjà la fenêtre</p>".encode("latin1"), "text/html; charset=latin1", "200 OK"),
]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_the_pages_of_a_web_archive(tmp_path, name):
    (tmp_path / name).write_bytes(web_archive(PAGES, gzipped=name.endswith("gz")))
    summary, rows = run(tmp_path, {"path": str(tmp_path / name), "license": "unknown"})
    assert [row["url"] for row in rows] == ["https://a.example/bridges", "https://a.example/fr"]
    first = rows[0]["text"]
    assert f"{prose('en', 1)}\n" in first, "paragraphs stay apart"
    assert not [words for words in ("hidden", "color", "About us", "All rights") if words in first]
    assert rows[1]["text"].strip() == "déjà la fenêtre"
    assert len(rows[0]["id"]) == 36 and rows[0]["license"] == "unknown"
    assert summary["removed"] == {"not HTML": 1, "not found": 1}


@pytest.mark.parametrize("gzipped", [True, False])
def test_a_damaged_web_archive(tmp_path, gzipped):
    path = tmp_path / ("a.warc.gz" if gzipped else "a.warc")
    for cut in (30, 400):
        path.write_bytes(web_archive(PAGES[:1], gzipped=gzipped)[:-cut])
        with pytest.raises(DamagedFile, match="cut off"):
            records(path)
    path.write_bytes(b"hello world\n" * 100)
    with pytest.raises(DamagedFile):
        records(path)


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
        "Histoire\n\npremier\nles ponts et un site"
    )


REDIRECT = page(2, "Pont", "#REDIRECT [[Le Pont]]", redirect=True)
WINTER = page(4, "Été &amp; hiver", f"L'été. {prose('fr', 1)}")
PAGES_OF_WIKI = [page(1, "Le Pont", WIKITEXT), REDIRECT, page(3, "Discussion:Pont", "bla", ns=1), WINTER]
GROUPS = [PAGES_OF_WIKI[:2], PAGES_OF_WIKI[2:], [page(5, "Vide", "{{Ébauche}}")]]


def test_a_multistream_dump(tmp_path):
    path = tmp_path / "frwiki-pages-articles-multistream.xml.bz2"
    path.write_bytes(b"".join(dump_streams("fr", GROUPS)))
    summary, rows = run(tmp_path, {"path": str(path), "name": "wikipedia"})
    base = "https://fr.wikipedia.org/wiki"
    urls = [(row["id"], row["url"]) for row in rows]
    assert urls == [("1", f"{base}/Le_Pont"), ("4", f"{base}/%C3%89t%C3%A9_%26_hiver")]
    assert rows[0]["text"].startswith("Le Pont\n\nLe Pont (né le 14 juillet")
    assert {(row["language"], row["license"]) for row in rows} == {("fr?", "cc-by-sa-4.0")}
    assert summary["removed"] == {"empty": 1}, "redirects and talk pages are no articles"


def test_a_book_is_cut_into_chapters(tmp_path):
    (tmp_path / "pg12.txt").write_text(book(12, "French"))
    _, rows = run(tmp_path, {"path": str(tmp_path / "pg12.txt"), "kind": "gutenberg"})
    assert [row["id"] for row in rows] == ["12#0", "12#1", "12#2", "12#3"]
    assert rows[0]["text"].startswith("A TALE\n\nby Nobody\n\nContents") and rows[0]["text"].endswith("CHAPITRE II")
    assert rows[1]["text"] == f"CHAPITRE I\n\n{prose('fr', 600)}"
    assert rows[3]["text"] == f"CHAPITRE III\n\n{prose('fr', 602)}"
    facts = {(row["url"], row["language"], row["license"]) for row in rows}
    assert facts == {("https://www.gutenberg.org/ebooks/12", "fr?", "public domain in the USA (Project Gutenberg)")}
