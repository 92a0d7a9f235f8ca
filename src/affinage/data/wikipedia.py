"""Reads MediaWiki XML dumps, such as Wikipedia's: the articles as plain text, streaming.

The text is what a reader of the article reads, without tables, references, pictures and boxes.
"""

import re
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator
from importlib.resources import files

import mwparserfromhell
import yaml
from mwparserfromhell import nodes
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

from affinage.config.data import SourceSettings
from affinage.data.files import DamagedFile, Part, open_plain
from affinage.data.readers import BadRecord, Record

LICENSE = "cc-by-sa-4.0"
_RULES = yaml.safe_load(files("affinage.data").joinpath("wikipedia.yaml").read_text(encoding="utf-8"))
_SHOWN = {name: shown for shown, names in _RULES["templates"].items() for name in names}
_TEXT = re.compile(r"\d+|texte?|fr", re.IGNORECASE)  # names of arguments that are text as those without names are
_OWN_NAME = re.compile("|".join(_RULES["own_names"]), re.IGNORECASE)
_INLINE_CHARACTERS = 80  # an argument of an unknown template in a sentence that is no longer stands for words


def read_dump(file: Part, settings: SourceSettings) -> Iterator[Record | BadRecord]:
    """The articles (namespace 0, no redirects) of a dump; what is no article is left out without being counted."""
    wiki, dropped = "", {*_RULES["dropped_namespaces"]}
    with open_plain(file) as stream:
        try:
            events = ElementTree.iterparse(stream, ("start", "end"))
            _, root = next(events)
            language = root.get("{http://www.w3.org/XML/1998/namespace}lang", "")
            for event, element in events:
                match event, element.tag.rpartition("}")[2]:
                    case "end", "base":  # the address of the main page
                        wiki = (element.text or "").rpartition("/")[0]
                    case "end", "namespace" if element.get("key") in ("6", "14"):  # files and categories
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


def wikitext_to_text(wikitext: str, dropped: Collection[str] = _RULES["dropped_namespaces"]) -> str:
    """The running text of an article, paragraphs and headings apart by a blank line; "" if there is none.

    Links to the namespaces `dropped` (in lower case) are no text, nor are sections that only list references and links.
    """
    code = mwparserfromhell.parse(wikitext)
    listed = code.get_sections(matches=lambda heading: str(heading).strip().lower() in _RULES["dropped_sections"])
    for section in reversed(listed):  # what is in another goes first
        del section.nodes[:]
    text = _render(code, dropped)
    for pattern, replacement in _RULES["tidy"].items():
        text = re.sub(pattern, replacement, text)
    return text.strip()


def _render(code: Wikicode | None, dropped: Collection[str]) -> str:
    parts = [""]
    for node in code.nodes if code is not None else ():
        parts.append(_words(node, dropped, parts[-1][-1:]))
    return "".join(parts)


def _words(node: nodes.Node, dropped: Collection[str], before: str) -> str:
    match node:
        case nodes.Text(value=text):
            return text
        case nodes.Wikilink():
            title = str(node.title).strip()
            namespace = title.partition(":")[0].strip().lower() if ":" in title else ""
            if namespace in dropped or (node.text is None and re.fullmatch(r"[a-z]{2,3}(-[a-z]+)?", namespace)):
                return ""  # the second is a link to another wiki
            return title.lstrip(":") if node.text is None else _render(node.text, dropped)
        case nodes.ExternalLink(title=inner) | nodes.Argument(default=inner):
            return _render(inner, dropped)
        case nodes.Heading():
            return f"\n\n{_render(node.title, dropped).strip()}\n\n"
        case nodes.Template():
            return _template(node, dropped, before)
        case nodes.Tag():
            name = str(node.tag).strip().lower()
            hidden = name in _RULES["dropped_tags"] or node.self_closing
            return "\n" if name in ("br", "hr") else "" if hidden else _render(node.contents, dropped)
        case nodes.HTMLEntity():
            return node.normalize()
    return ""  # of comments


def _template(node: nodes.Template, dropped: Collection[str], before: str) -> str:
    name = str(node.name).strip()
    arguments = [_render(each.value, dropped).strip() for each in node.params if _TEXT.fullmatch(each.name.strip())]
    words = " ".join(filter(None, arguments))
    if _OWN_NAME.fullmatch(name):  # {{XIIe siècle}}, {{1er|mai}}
        return f"{name} {words}".strip()
    function, colon, argument = name.partition(":")
    if colon and function.lower() in _RULES["functions"]:
        return argument.strip()
    name = name.lower().replace("_", " ")
    if name in _RULES["centuries"]:
        numerals = [each.upper() for each in arguments if re.fullmatch("[ivxlc]+", each, re.IGNORECASE)]
        numbers = [each + ("er" if each == "I" else "e") for each in numerals]
        return f"{' et '.join(numbers)} siècle{'s' if len(numbers) > 1 else ''}" if numbers else ""
    if arguments and name in _RULES["fractions"]:
        return " ".join([*arguments[:-2], "/".join(["1", *arguments][-2:])])
    if sign := _RULES["ordinals"].get(name):
        return words if words and before.isalnum() else words + sign
    if (shown := _SHOWN.get("lang-" if name.startswith("lang-") else name)) is not None:
        return shown.format(words, *arguments, "", "", "").strip() if "{" in shown else shown
    # Of a template that is not known, within a sentence, the words are its arguments, if they have no names but `_TEXT`
    # and are few and short; others are boxes, references and notices.
    short = 1 <= len(arguments) <= 2 and max(map(len, arguments)) <= _INLINE_CHARACTERS
    return words if before not in ("", "\n") and short and len(arguments) == len(node.params) else ""
