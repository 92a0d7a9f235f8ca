"""Books of Project Gutenberg: without their header and license, cut into parts, with what the header says."""

import dataclasses
import re
from collections.abc import Iterator

from affinage.data.readers import BadRecord, Record

LICENSE = "public domain in the USA (Project Gutenberg)"
PART_CHARACTERS = 50_000  # of a book, about; a longer document than `data.filters.max_characters` is removed
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
_CODES = {"English": "en", "French": "fr", "German": "de", "Spanish": "es", "Italian": "it", "Portuguese": "pt"}
_PRODUCED = re.compile(r"\A\s*(?:Produced|E-text prepared|Transcribed) (?:by|from)[^\n]*(?:\n[^\n]+)*\n", re.I)


def parts_of_book(book: Record) -> Iterator[Record | BadRecord]:
    """A book without Project Gutenberg's header and license, cut at blank lines into records `<book>#<part>`.

    The number of the book is its header's, or its file's. Books that the project says are still under copyright are
    refused.
    """
    text = book.text.replace("\r\n", "\n").replace("\r", "\n")
    head = text[:_HEAD_CHARACTERS]
    number = _BOOK.search(head) or _BOOK_IN_NAME.search(book.id)
    id = number[1] if number else book.id
    if "this is a copyrighted project gutenberg" in head.lower():
        yield BadRecord(id, "under copyright", "its header says so", head[:200])
        return
    if start := _START.search(text, 0, _HEAD_CHARACTERS):
        text = text[start.end() :]
    if end := _END.search(text, len(text) // 2):
        text = text[: end.start()]
    text = _PRODUCED.sub("", text).strip("\n").rstrip()
    if not text:
        yield BadRecord(id, "empty", "nothing between header and license", head[:200])
        return
    language, url = _LANGUAGE.search(head), f"https://www.gutenberg.org/ebooks/{number[1]}" if number else ""
    whole = dataclasses.replace(
        book,
        language=book.language or _CODES.get(language[1] if language else "", ""),
        url=book.url or url,
        license=book.license or LICENSE,
    )
    position, begin = 0, 0
    while begin < len(text):
        blank = text.find("\n\n", begin + PART_CHARACTERS)
        stop = len(text) if blank < 0 else blank
        yield dataclasses.replace(whole, id=f"{id}#{position}", text=text[begin:stop].strip("\n"))
        position, begin = position + 1, stop
