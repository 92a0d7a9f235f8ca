"""Elements of inline SVG, every attribute and text escaped."""

from markupsafe import Markup, escape


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """One SVG element. `class_` is written `class`, `stroke_width` is written `stroke-width`; None is left out."""
    written = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), pixel(value))
        for name, value in attributes.items()
        if value is not None
    )
    return Markup("<{}{}>{}</{}>").format(Markup(tag), written, Markup("").join(map(escape, children)), Markup(tag))


def pixel(value: object) -> object:
    """Coordinates to a tenth of a pixel, which no eye can tell from more; anything else as it is."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return value


def text(x: float, y: float, content: str, class_: str, anchor: str = "start") -> Markup:
    """A line of text; `anchor` is start, middle or end."""
    return element("text", content, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def marker(x: float, y: float, series: int, radius: float = 4.0, *, title: str = "", hollow: bool = False) -> Markup:
    """A point whose shape tells series apart where colours do not: circle, square, triangle, diamond."""
    classes = f"mark s{series % 6}{' hollow' if hollow else ''}"
    inside = [element("title", title)] if title else []
    shape = series % 4
    if shape == 0:
        return element("circle", *inside, cx=x, cy=y, r=radius, class_=classes)
    reach = radius * (0.9, 1.2, 1.25)[shape - 1]
    corners = (
        [(-reach, -reach), (reach, -reach), (reach, reach), (-reach, reach)],
        [(0, -reach), (reach, reach * 0.8), (-reach, reach * 0.8)],
        [(0, -reach), (reach, 0), (0, reach), (-reach, 0)],
    )[shape - 1]
    points = " ".join(f"{pixel(float(x + dx))},{pixel(float(y + dy))}" for dx, dy in corners)
    return element("polygon", *inside, points=points, class_=classes)


def polyline(points: list[tuple[float, float]], class_: str) -> Markup:
    """An open line through points."""
    path = "M" + "L".join(f"{pixel(float(x))},{pixel(float(y))}" for x, y in points)
    return element("path", d=path, class_=class_)


def drawing(width: float, height: float, label: str, *children: Markup, **attributes: object) -> Markup:
    """A picture that scales to its place, with a text for those who do not see it."""
    view = f"0 0 {pixel(width)} {pixel(height)}"
    return element("svg", *children, viewBox=view, role="img", aria_label=label, **attributes)
