"""Books of Project Gutenberg: without their header and license, cut into chapters, with what the header says."""

import re
from collections.abc import Iterator

from babel import Locale

from affinage.data.readers import BadRecord, Record

LICENSE = "public domain in the USA (Project Gutenberg)"
_HEAD_CHARACTERS = 20_000  # headers are shorter
_START = re.compile(
    r"^\*{3} ?START OF (?:THE|THIS) PROJECT GUTENBERG.*?\*{3}[ \t]*$|^\*END[* ]{0,2}THE SMALL PRINT![^\n]*$"
    r"|^\*+ ?These (?:original )?(?:e-?texts|ebooks) (?:are|were) prepared[^\n]*$",
    re.I | re.M | re.S,
)
_END = re.compile(
    r"^\s*\**\s*(?:End of (?:the |this )?|Fin (?:de|du) )Proje(?:ct|t) Gutenberg|^\*{3} ?END OF TH(?:E|IS) PROJECT",
    re.I | re.M,
)
_BOOK = re.compile(r"\[\s*(?:e-?book|e-?text)\s*#\s*(\d+)", re.I)
_BOOK_IN_NAME = re.compile(r"(?:^|/|pg)(\d{1,6})(?:-\d)?(?:\.txt|\.utf8|$)", re.I)
_LANGUAGE = re.compile(r"^Language:[ \t]*([A-Za-zÀ-ÿ]+)", re.I | re.M)
_PRODUCED = re.compile(r"\A\s*(?:Produced|E-text prepared|Transcribed) (?:by|from)[^\n]*(?:\n[^\n]+)*\n", re.I)

_NUMBER = (
    r"(?:[IVXLC]+|\d{1,3}|(?:the )?(?:first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last|one|two|"
    r"three|four|five|six|seven|eight|nine|ten|eleven|twelve|premier|première|deuxième|seconde|troisième|quatrième|"
    r"cinquième|sixième|septième|huitième|neuvième|dixième|dernier|dernière))"
)
_DIVISION = (
    r"(?:chapter|chapitre|book|livre|part|partie|letter|lettre|act|acte|canto|chant|tome|volume|stave|scene|scène)"
)
# A numbered heading is a line of its own. Other headings are short lines between blank ones.
_HEADING = re.compile(
    rf"^[ \t]*{_DIVISION}[ \t]+{_NUMBER}[.:]?[ \t]*$"
    rf"|(?:\A|(?<=\n\n))[ \t]*(?:{_DIVISION}[ \t]+{_NUMBER}\b[^\n]{{0,80}}|{_NUMBER}[ \t]+{_DIVISION}[^\n]{{0,60}}"
    rf"|(?:prologue|epilogue|épilogue|preface|préface|introduction|conclusion|foreword|avant-propos|{_NUMBER})\.?)"
    r"[ \t]*\n(?=[ \t]*\n)",
    re.I | re.M,
)
_SHORT = 400  # characters: a part of less is a line of a table of contents, or a heading with another one after it


def chapters(book: Record) -> Iterator[Record | BadRecord]:
    """The chapters of a book as records `<book>#<chapter>`, from 0 for what comes before the first heading.

    The number of the book is its header's, or its file's. A book without headings is one record `<book>#0`. Books
    that the project says are still under copyright are refused.
    """
    text = book.text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    head = text[:_HEAD_CHARACTERS]
    number = _BOOK.search(head) or _BOOK_IN_NAME.search(book.id)
    id = number[1] if number else book.id
    body = strip_license(text)
    if "this is a copyrighted project gutenberg" in head.lower():
        yield BadRecord(id, "under copyright", "its header says so", head[:200])
        return
    if not body:
        yield BadRecord(id, "empty", "nothing between header and license", text[:200])
        return
    stated = _LANGUAGE.search(head)
    language = next((code for code, name in Locale("en").languages.items() if stated and name == stated[1]), "")
    for position, part in enumerate(split_chapters(body)):
        yield Record(
            f"{id}#{position}",
            part,
            source=book.source,
            language=book.language or language,
            url=book.url or (f"https://www.gutenberg.org/ebooks/{number[1]}" if number else ""),
            license=book.license or LICENSE,
        )


def strip_license(text: str) -> str:
    """The text of a book between Project Gutenberg's header and license, in their present and their older forms."""
    if start := _START.search(text, 0, _HEAD_CHARACTERS):
        text = text[start.end() :]
    if end := _END.search(text, len(text) // 2):
        text = text[: end.start()]
    return _PRODUCED.sub("", text).strip("\n").rstrip()


def split_chapters(body: str) -> list[str]:
    """Cut a book before each heading that has text of its own.

    Headings close to each other stay together: a table of contents with what comes before the first chapter, BOOK I
    with the CHAPTER I after it.
    """
    starts = [match.start() for match in _HEADING.finditer(body)]
    parts, pending = [body[: starts[0]] if starts else body], ""
    for start, stop in zip(starts, [*starts[1:], len(body)]):
        piece = body[start:stop]
        if len(piece.strip()) >= _SHORT:
            parts.append(pending + piece)
            pending = ""
        elif len(parts) == 1:
            parts[0] += piece
        else:
            pending += piece
    parts[-1] += pending
    return [part.strip("\n") for part in parts if part.strip()]
