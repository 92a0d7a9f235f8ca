"""Wikitext to plain text: what a reader of the article reads, without tables, references, pictures and boxes."""

import re
from collections.abc import Iterable

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.wikicode import Wikicode

# Elements that hold no running text.
_DROPPED_TAGS = frozenset(
    "ref references table gallery math chem timeline score imagemap syntaxhighlight source pre style script "
    "templatestyles mapframe maplink hiero graph section indicator inputbox categorytree".split()
)
# Sections that list where to read on.
_DROPPED_SECTIONS = frozenset(
    {"references", "external links", "see also", "further reading", "notes", "bibliography", "sources", "citations"}
    | {"notes and references", "footnotes", "références", "notes et références", "liens externes", "voir aussi"}
    | {"bibliographie", "annexes", "articles connexes", "note", "notes"}
)
_MAGIC_WORDS = re.compile(r"__[A-Z]{3,}__")
_EMPTY_BRACKETS = re.compile(r" ?\((?:[\s,;:]|\u00a0)*\)")
_AFTER_BRACKET = re.compile(r"\((?:[\s,;]|\u00a0)+(?=\S)")  # what a template left before the text: (; born 1840)
_SPACE_BEFORE = re.compile(r" +(?=[,.)])")
_SPACES = re.compile(r"[ \t]+")
_INTERLANGUAGE = re.compile(r"^[a-z]{2,3}(-[a-z]+)?$")
_CENTURY = re.compile(r"^(-?[ivxlc]+)(er|re|e|ème)? (siècle|millénaire)( av\. j\.-c\.)?$", re.IGNORECASE)


# Templates that stand for words in a sentence, by the words: {0} is the first argument without a name, {all} all of
# them. Without these the meaning of the sentence would be lost. Of other templates see `_template`.
_TEMPLATES = {
    name: words
    for words, names in {
        "{0}": "nowrap, nobr, nobreak, citation, «, small, abbr, abréviation, ill, lien, quote, exp, sup, ind, sub",
        "{1}": "lang, langue",
        "{0} {1}": "convert, cvt",
        "{all}": "date, date-, unité, formatnum, nb, heure, nombre, nombre-, mesure, date de naissance, "
        "date de décès, unité/2",
        "c. {all}": "circa, c.",
        "nº {all}": "no, numéro, n°",
        "º {all}": "o",
        "as of {all}": "as of",
        "M. {all}": "m.",
        "Mme {all}": "mme",
        "Mlle {all}": "mlle",
        "Dr {all}": "dr",
        "Me {all}": "me",
        " – ": "snd, spnd, ndash, –",
        "|": "!",
        **{sign: sign for sign in "er re e ème nd nde 1er 1re 2e".split()},
    }.items()
    for name in names.split(", ")
}
_INLINE_CHARACTERS = 80  # an argument of an unknown template in a sentence that is no longer stands for words


def wikitext_to_text(wikitext: str, dropped_namespaces: Iterable[str] = ("file", "image", "category")) -> str:
    """The running text of an article, paragraphs and headings apart by a blank line; "" if there is none.

    `dropped_namespaces` (in lower case) are those whose links are no text: pictures and categories, in the wiki's
    language. Sections that only list references and links, and those left empty, are dropped with their headings.
    """
    code = mwparserfromhell.parse(wikitext)
    return _without_empty_sections(_tidy(_render(code, frozenset(dropped_namespaces))))


_HEADING = "\x01"  # marks the line of a heading, with its level as a letter, until empty sections are gone


def _render(code: Wikicode, dropped: frozenset[str]) -> str:
    parts: list[str] = []
    for node in code.nodes:
        parts.append(_render_node(node, dropped, inline=bool(parts) and parts[-1][-1:] not in ("", "\n")))
    return "".join(parts)


def _render_node(node: nodes.Node, dropped: frozenset[str], *, inline: bool) -> str:
    """The text of a node; `inline`: it goes on a line that has begun."""
    match node:
        case nodes.Text():
            return str(node.value)
        case nodes.Wikilink():
            return _link(node, dropped)
        case nodes.ExternalLink():
            return _render(node.title, dropped) if node.title is not None else ""
        case nodes.Heading():
            return f"\n\n{_HEADING}{node.level}{_render(node.title, dropped).strip()}\n\n"
        case nodes.Template():
            return _template(node, dropped, inline=inline)
        case nodes.Tag():
            return _tag(node, dropped)
        case nodes.HTMLEntity():
            return str(node.normalize())
        case nodes.Argument():
            return _render(node.default, dropped) if node.default is not None else ""
    return ""  # comments


def _link(node: nodes.Wikilink, dropped: frozenset[str]) -> str:
    title = str(node.title).strip()
    namespace = title.partition(":")[0].strip().lower() if ":" in title else ""
    if namespace in dropped or (_INTERLANGUAGE.match(namespace) and node.text is None):
        return ""
    return _render(node.text, dropped) if node.text is not None else title.lstrip(":")


def _template(node: nodes.Template, dropped: frozenset[str], *, inline: bool) -> str:
    """The words that a template stands for.

    Of one that is not known, within a sentence, these are its arguments, if they have no names and are few and short;
    others are boxes, references and notices.
    """
    name = str(node.name).strip()
    arguments = [_render(each.value, dropped).strip() for each in node.params if not each.showkey]
    function, colon, argument = name.partition(":")
    if century := _CENTURY.match(name):
        return f"{century[1].upper()}{century[2] or 'e'} {century[3].lower()}{(century[4] or '').lower()}"
    if colon and function.lower() in ("formatnum", "lc", "uc", "ucfirst", "lcfirst"):
        return argument.strip()
    name = name.lower().replace("_", " ")
    present = [each for each in arguments if each]
    if name in ("s", "s-", "siècle"):
        return _centuries(present[:1])
    if name in ("s2", "sp", "s2-"):
        return _centuries([each for each in present if not each.upper().strip("IVXLC")])
    if name in ("frac", "fraction", "sfrac"):
        return "/".join(present)
    if words := _TEMPLATES.get(name) or ("{0}" if name.startswith("lang-") else ""):
        values = dict(enumerate(arguments)) | {"all": " ".join(present)}
        filled = re.sub(
            r"\{(\w+)\}", lambda match: values.get(int(match[1]) if match[1].isdigit() else "all", ""), words
        )
        return filled if words == filled else filled.strip()
    short = 1 <= len(arguments) <= 2 and max(map(len, arguments)) <= _INLINE_CHARACTERS
    return " ".join(present) if inline and short and len(arguments) == len(node.params) else ""


def _centuries(numerals: list[str]) -> str:
    """`{{s2|XVIII|XIX}}`: the eighteenth and the nineteenth."""
    numbers = [f"{roman.upper()}{'er' if roman.lower() == 'i' else 'e'}" for roman in numerals]
    return f"{' et '.join(numbers)} siècle{'s' if len(numbers) > 1 else ''}" if numbers else ""


def _tag(node: nodes.Tag, dropped: frozenset[str]) -> str:
    name = str(node.tag).strip().lower()
    if name in _DROPPED_TAGS:
        return ""
    if name in ("br", "hr"):
        return "\n"
    if name in ("li", "dd", "dt") or node.self_closing:
        return ""  # the sign of a list; its text follows
    return _render(node.contents, dropped) if node.contents is not None else ""


def _tidy(text: str) -> str:
    text = _MAGIC_WORDS.sub("", text).replace("\r", "")
    text = _AFTER_BRACKET.sub("(", _EMPTY_BRACKETS.sub("", text))
    lines = [_SPACE_BEFORE.sub("", _SPACES.sub(" ", line)).strip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _without_empty_sections(text: str) -> str:
    """Drop headings after which no text comes before the next of their rank, and sections that only list links."""
    kept: list[str] = []
    dropping = 0  # the level of the heading whose section is being dropped
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(_HEADING):
            level = int(paragraph[1])
            if dropping and level > dropping:
                continue
            dropping = level if paragraph[2:].strip().lower() in _DROPPED_SECTIONS else 0
            while kept and kept[-1].startswith(_HEADING) and int(kept[-1][1]) >= level:
                kept.pop()
        if not dropping and paragraph.strip():
            kept.append(paragraph)
    while kept and kept[-1].startswith(_HEADING):
        kept.pop()
    return "\n\n".join(each[2:] if each.startswith(_HEADING) else each for each in kept)
