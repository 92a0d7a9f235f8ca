"""Books of Project Gutenberg: without their header and license, cut into chapters, with what the header says."""

import re
from collections.abc import Iterator

from babel import Locale

from affinage.data.readers import BadRecord, Record

LICENSE = "public domain in the USA (Project Gutenberg)"
_HEAD_CHARACTERS = 20_000  # headers are shorter
_TAIL_SHARE = 0.5  # an end marker is looked for in the second half alone
_STARTS = (
    re.compile(r"^\*{3} ?START OF (?:THE|THIS) PROJECT GUTENBERG.*?\*{3}[ \t]*$", re.I | re.M | re.S),
    re.compile(r"^\*END[* ]{0,2}THE SMALL PRINT!.*$", re.I | re.M),
    re.compile(r"^\*+ ?These (?:original )?(?:e-?texts|ebooks) (?:are|were) prepared.*$", re.I | re.M),
)
_ENDS = (
    re.compile(r"^\*{3} ?END OF (?:THE|THIS) PROJECT GUTENBERG.*", re.I | re.M),
    re.compile(r"^\s*\**\s*End of (?:the |this )?Project Gutenberg.*", re.I | re.M),
    re.compile(r"^\s*(?:Fin|FIN) (?:de|du) (?:Project Gutenberg|projet Gutenberg).*", re.I | re.M),
)
_BOOK = re.compile(r"\[\s*(?:e-?book|e-?text)\s*#\s*(\d+)", re.I)
_BOOK_IN_NAME = re.compile(r"(?:^|/|pg)(\d{1,6})(?:-\d)?(?:\.txt|\.utf8|$)", re.I)
_LANGUAGE = re.compile(r"^Language:[ \t]*([A-Za-zÀ-ÿ]+)", re.I | re.M)
_COPYRIGHTED = re.compile(r"this is a copyrighted project gutenberg", re.I)
_PRODUCED = re.compile(
    r"\A\s*(?:Produced by|E-text prepared by|Transcribed from|This e-?text was)[^\n]*(?:\n[^\n]+)*\n", re.I
)

_NUMBER = r"(?:[IVXLC]+|\d{1,3})"
_ORDINAL = (
    r"(?:the )?(?:first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last|one|two|three|four|five|six|"
    r"seven|eight|nine|ten|eleven|twelve|premier|première|deuxième|second|seconde|troisième|quatrième|cinquième|"
    r"sixième|septième|huitième|neuvième|dixième|dernier|dernière)"
)
_KEYWORD = (
    r"(?:chapter|chapitre|book|livre|part|partie|letter|lettre|act|acte|canto|chant|tome|volume|stave|scene|scène)"
)
_NUMBERED = rf"{_KEYWORD}[ \t]+(?:{_NUMBER}|{_ORDINAL})[.:]?[ \t]*"
# A heading is a short line of its own after a blank line, and before one: the title of a numbered chapter may come
# between.
_HEADING = re.compile(
    rf"(?:\A|\n[ \t]*\n)(?P<line>[ \t]*(?:"
    rf"{_NUMBERED}(?:\n[^\n]{{1,80}}){{0,2}}"
    rf"|{_KEYWORD}[ \t]+(?:{_NUMBER}|{_ORDINAL})\b[^\n]{{0,80}}"
    rf"|{_ORDINAL}[ \t]+(?:part|partie|book|livre|acte)[^\n]{{0,60}}"
    rf"|(?:prologue|epilogue|épilogue|preface|préface|introduction|conclusion|foreword|avant-propos)\.?"
    rf"|{_NUMBER}\.?"
    rf")[ \t]*)\n(?=[ \t]*\n)",
    re.I,
)
# Where paragraphs are lines, without blank ones between, only what is surely a heading is taken for one.
_LINE_HEADING = re.compile(rf"^(?P<line>[ \t]*{_NUMBERED})$", re.I | re.M)
_LINES_PER_BLANK = 20  # more lines than this for every blank one: paragraphs are lines
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
    if _COPYRIGHTED.search(head):
        yield BadRecord(id, "under copyright", "its header says so", head[:200])
        return
    stated = _LANGUAGE.search(head)
    language = next((code for code, name in Locale("en").languages.items() if stated and name == stated[1]), "")
    body = strip_license(text)
    if not body:
        yield BadRecord(id, "empty", "nothing between header and license", text[:200])
        return
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
    for start in _STARTS:
        if found := start.search(text, 0, _HEAD_CHARACTERS + 2_000):
            text = text[found.end() :]
            break
    half = int(len(text) * _TAIL_SHARE)
    cuts = [found.start() for end in _ENDS if (found := end.search(text, half))]
    text = text[: min(cuts)] if cuts else text
    return _PRODUCED.sub("", text).strip("\n").rstrip()


def split_chapters(body: str) -> list[str]:
    """Cut a book before each heading that has text of its own.

    Headings close to each other stay together: a table of contents with what comes before the first chapter, BOOK I
    with the CHAPTER I after it.
    """
    apart = body.count("\n\n") * _LINES_PER_BLANK >= body.count("\n")
    starts = [match.start("line") for match in (_HEADING if apart else _LINE_HEADING).finditer(body)]
    pieces = [body[a:b] for a, b in zip([0, *starts], [*starts, len(body)])]
    parts: list[str] = [pieces[0]]
    pending, begun = "", False
    for piece in pieces[1:]:
        if len(piece.strip()) < _SHORT:
            if begun:
                pending += piece
            else:
                parts[0] += piece
            continue
        parts.append(pending + piece)
        pending, begun = "", True
    parts[-1] += pending
    return [part.strip("\n") for part in parts if part.strip()] or [body]
