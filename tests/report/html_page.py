"""A page, parsed: its tags and texts, and which texts are the page's own words."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "wbr", "hr"}
OF_THE_RUN = {"document", "provenance", "description", "versions", "flow"}  # classes of what a run brings itself
TECHNICAL = {"code", "pre", "style", "script", "title"}


def plain(text: str) -> str:
    """With usual spaces in place of those that do not break."""
    return text.replace("\u202f", " ").replace("\xa0", " ")


class Page(HTMLParser):
    """Checks nesting as it reads. `own` are the texts and labels that are no documents, names or code."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, bool]] = []  # with whether what it holds is not the page's own
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.own: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        given, within = dict(attrs), bool(self.open) and self.open[-1][1]
        foreign = within or tag in TECHNICAL or bool(OF_THE_RUN & {*(given.get("class") or "").split()})
        if tag not in VOID:
            self.open.append((tag, foreign))
        if not foreign:
            self.own += [text for name in ("aria-label", "title") if (text := given.get(name))]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if data.strip() and not self.open[-1][1]:
            self.own.append(data.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def shown(self) -> str:
        """All text, with single plain spaces."""
        return " ".join(plain("".join(self.texts)).split())
