"""Reads MediaWiki XML dumps, such as Wikipedia's: the articles as plain text, streaming.

The text is what a reader of the article reads, without tables, references, pictures and boxes.
"""

import re
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

from affinage.config.data import SourceSettings
from affinage.data.files import DamagedFile, Part, open_plain
from affinage.data.readers import BadRecord, Record

LICENSE = "cc-by-sa-4.0"
_XML_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
_NO_TEXT = ("6", "14")  # the namespaces of files and categories: links to them are no text
# Elements that hold no running text, or whose text follows them (the signs of lists).
_DROPPED_TAGS = frozenset(
    "ref references table gallery math chem timeline score imagemap syntaxhighlight source pre style script "
    "templatestyles mapframe maplink hiero graph section indicator inputbox categorytree li dd dt".split()
)
_DROPPED_SECTIONS = (  # those that list where to read on
    r"^\s*(references|external links|see also|further reading|notes?|bibliography|sources|citations|footnotes|annexes"
    r"|notes and references|(notes et )?références|liens externes|voir aussi|bibliographie|articles connexes)\s*$"
)
_TEXT = re.compile(r"\d+|texte?|fr", re.IGNORECASE)  # names of arguments that are text as those without names are
_CENTURY = re.compile(r"-?[ivxlc]+(er|re|e|ème)? (siècle|millénaire)", re.IGNORECASE)
# Templates that stand for words in a sentence: by name how many of the arguments are skipped, how many are words, and
# what comes before them. Without these the meaning of the sentence would be lost. Of other templates see `_template`.
_TEMPLATES: dict[str, tuple[int, int, str]] = {
    **dict.fromkeys("nowrap nobr citation « small abbr abréviation ill lien quote exp sup ind sub".split(), (0, 1, "")),
    **dict.fromkeys(("lang", "langue", "langx"), (1, 1, "")),
    **dict.fromkeys(("convert", "cvt"), (0, 2, "")),
    **dict.fromkeys(("date", "date-", "unité", "nombre", "date de naissance", "date de décès"), (0, 9, "")),
    **dict.fromkeys(("circa", "c."), (0, 9, "c. ")),
    **dict.fromkeys(("no", "numéro", "n°"), (0, 9, "nº ")),
    **{"o": (0, 9, "º "), "as of": (0, 9, "as of "), "m.": (0, 9, "M. "), "mme": (0, 9, "Mme "), "dr": (0, 9, "Dr ")},
    **{sign: (0, 0, sign) for sign in "er re e ème nd nde 1er 1re 2e".split()},
    **dict.fromkeys(("snd", "spnd", "ndash", "–"), (0, 0, " – ")) | {"nbsp": (0, 0, "\u00a0"), "'": (0, 0, "'")},
}
_INLINE_CHARACTERS = 80  # an argument of an unknown template in a sentence that is no longer stands for words
_TIDY = [  # patterns, and what takes their place
    (re.compile(r"__[A-Z]{3,}__|\r"), ""),
    (re.compile(r" ?\((?:[\s,;:]|\u00a0)*\)"), ""),
    (re.compile(r"\((?:[\s,;]|\u00a0)+(?=\S)"), "("),  # what a template left before the text: (; born 1840)
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r" (?=[,.)])|(?<=\n) | (?=\n)"), ""),
    (re.compile(r"\n{3,}"), "\n\n"),
]


def read_dump(file: Part, settings: SourceSettings) -> Iterator[Record | BadRecord]:
    """The articles (namespace 0, no redirects) of a dump; what is no article is left out without being counted."""
    wiki, dropped = "", {"file", "image", "category"}
    with open_plain(file) as stream:
        try:
            events = ElementTree.iterparse(stream, ("start", "end"))
            _, root = next(events)
            language = root.get(_XML_LANGUAGE, "")
            for event, element in events:
                match event, element.tag.rpartition("}")[2]:
                    case "end", "base":  # the address of the main page
                        wiki = (element.text or "").rpartition("/")[0]
                    case "end", "namespace" if element.get("key") in _NO_TEXT:
                        dropped.add((element.text or "").lower())
                    case "end", "page":
                        root.clear()  # of the pages before
                        if element.findtext("{*}ns") == "0" and element.find("{*}redirect") is None:
                            yield _article(element, wiki, language, dropped)
        except ElementTree.ParseError as error:
            raise DamagedFile(f"the file is cut off, damaged, or no MediaWiki dump: {error}") from None
    if not wiki:
        raise DamagedFile("the file is no MediaWiki dump: it has no <siteinfo> with a <base>")


def _article(page: ElementTree.Element, wiki: str, language: str, dropped: Collection[str]) -> Record | BadRecord:
    id, title, wikitext = (page.findtext(f"{{*}}{name}") or "" for name in ("id", "title", "revision/{*}text"))
    try:
        text = wikitext_to_text(wikitext, dropped)
    except (ParserError, RecursionError) as error:
        return BadRecord(id, "wikitext cannot be parsed", str(error), wikitext[:200])
    if not text:
        return BadRecord(id, "empty", f"no text in the article {title!r}")
    url = f"{wiki}/{urllib.parse.quote(title.replace(' ', '_'), safe='/:(),')}"
    return Record(id, f"{title}\n\n{text}", language=language, url=url, license=LICENSE)


# ---- wikitext ----


def wikitext_to_text(wikitext: str, dropped: Collection[str] = ("file", "image", "category")) -> str:
    """The running text of an article, paragraphs and headings apart by a blank line; "" if there is none.

    Links to the namespaces `dropped` (in lower case) are no text, nor are sections that only list references and links.
    """
    code = mwparserfromhell.parse(wikitext)
    for section in reversed(code.get_sections(matches=_DROPPED_SECTIONS)):  # what is in another goes first
        del section.nodes[:]
    text = _render(code, dropped)
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return text.strip()


def _render(code: Wikicode | None, dropped: Collection[str]) -> str:
    parts: list[str] = []
    for node in code.nodes if code is not None else ():
        text = ""  # of comments
        match node:
            case nodes.Text():
                text = str(node.value)
            case nodes.Wikilink():
                title = str(node.title).strip()
                namespace = title.partition(":")[0].strip().lower() if ":" in title else ""
                other_wiki = node.text is None and re.fullmatch(r"[a-z]{2,3}(-[a-z]+)?", namespace)
                if namespace not in dropped and not other_wiki:
                    text = title.lstrip(":") if node.text is None else _render(node.text, dropped)
            case nodes.ExternalLink():
                text = _render(node.title, dropped)
            case nodes.Heading():
                text = f"\n\n{_render(node.title, dropped).strip()}\n\n"
            case nodes.Template():
                inline = bool(parts) and parts[-1][-1:] not in ("", "\n")  # it goes on a line that has begun
                text = _template(node, dropped, inline=inline)
            case nodes.Tag():
                name = str(node.tag).strip().lower()
                hidden = name in _DROPPED_TAGS or node.self_closing
                text = "\n" if name in ("br", "hr") else "" if hidden else _render(node.contents, dropped)
            case nodes.HTMLEntity():
                text = str(node.normalize())
            case nodes.Argument():
                text = _render(node.default, dropped)
        parts.append(text)
    return "".join(parts)


def _template(node: nodes.Template, dropped: Collection[str], *, inline: bool) -> str:
    # Of a template that is not known, within a sentence, the words are its arguments, if they have no names but `_TEXT`
    # and are few and short; others are boxes, references and notices.
    name = str(node.name).strip()
    arguments = [_render(each.value, dropped).strip() for each in node.params if _TEXT.fullmatch(each.name.strip())]
    if _CENTURY.match(name):
        return name
    function, colon, argument = name.partition(":")
    if colon and function.lower() in ("formatnum", "lc", "uc", "ucfirst", "lcfirst"):
        return argument.strip()
    name = name.lower().replace("_", " ")
    if name in ("s", "s-", "siècle", "s2", "sp", "s2-"):  # {{s2|XVIII|XIX}}
        numerals = [each.upper() for each in arguments if each and not each.upper().strip("IVXLC")]
        numbers = [f"{roman}{'er' if roman == 'I' else 'e'}" for roman in numerals[: 1 if name[1:2] != "2" else None]]
        return f"{' et '.join(numbers)} siècle{'s' if len(numbers) > 1 else ''}" if numbers else ""
    if name in ("frac", "fraction", "sfrac"):
        return "/".join(filter(None, arguments))
    if known := _TEMPLATES.get(name) or ((0, 1, "") if name.startswith("lang-") else None):
        skipped, count, before = known
        words = before + " ".join(filter(None, arguments[skipped : skipped + count]))
        return words if count == 0 else words.strip()
    short = 1 <= len(arguments) <= 2 and max(map(len, arguments)) <= _INLINE_CHARACTERS
    return " ".join(filter(None, arguments)) if inline and short and len(arguments) == len(node.params) else ""
