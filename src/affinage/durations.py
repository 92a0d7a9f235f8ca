"""How long something takes, for people."""


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: 29 ms, 0.8 s, 45 s, 1 min 12 s, 2 h 05 min, 3 d 4 h."""
    if 0 < seconds < 0.05:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole, minutes, hours = round(seconds), round(seconds / 60), round(seconds / 3600)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes < 24 * 60 else f"{hours // 24} d {hours % 24} h"
