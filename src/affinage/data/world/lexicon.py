"""Everyday words whose English and French forms we state ourselves, with the agreement they ask for."""

from dataclasses import dataclass

from affinage.data.world.french import Gender


@dataclass(frozen=True)
class Noun:
    """A being that can act."""

    en: str
    en_plural: str
    fr: str
    fr_plural: str
    gender: Gender
    animal: bool = False


@dataclass(frozen=True)
class Adjective:
    """A quality: English has one form, French four, and a fifth before a vowel for some."""

    en: str
    masculine: str
    feminine: str
    masculine_plural: str
    feminine_plural: str
    before: bool = False  # French puts it before the noun
    before_vowel: str = ""  # "vieil"; empty: the masculine itself
    colour: bool = False  # said of animals only

    def french(self, gender: Gender, plural: bool) -> str:
        """The French form that agrees."""
        if gender == "m":
            return self.masculine_plural if plural else self.masculine
        return self.feminine_plural if plural else self.feminine


@dataclass(frozen=True)
class Verb:
    """What a being does, third person of the present."""

    en: str
    en_plural: str
    fr: str
    fr_plural: str


NOUNS = (
    Noun("cat", "cats", "chat", "chats", "m", animal=True),
    Noun("dog", "dogs", "chien", "chiens", "m", animal=True),
    Noun("horse", "horses", "cheval", "chevaux", "m", animal=True),
    Noun("wolf", "wolves", "loup", "loups", "m", animal=True),
    Noun("fox", "foxes", "renard", "renards", "m", animal=True),
    Noun("rabbit", "rabbits", "lapin", "lapins", "m", animal=True),
    Noun("bird", "birds", "oiseau", "oiseaux", "m", animal=True),
    Noun("donkey", "donkeys", "âne", "ânes", "m", animal=True),
    Noun("cow", "cows", "vache", "vaches", "f", animal=True),
    Noun("hen", "hens", "poule", "poules", "f", animal=True),
    Noun("goat", "goats", "chèvre", "chèvres", "f", animal=True),
    Noun("frog", "frogs", "grenouille", "grenouilles", "f", animal=True),
    Noun("girl", "girls", "fille", "filles", "f"),
    Noun("woman", "women", "femme", "femmes", "f"),
    Noun("queen", "queens", "reine", "reines", "f"),
    Noun("sister", "sisters", "sœur", "sœurs", "f"),
    Noun("aunt", "aunts", "tante", "tantes", "f"),
    Noun("boy", "boys", "garçon", "garçons", "m"),
    Noun("king", "kings", "roi", "rois", "m"),
    Noun("brother", "brothers", "frère", "frères", "m"),
    Noun("uncle", "uncles", "oncle", "oncles", "m"),
    Noun("doctor", "doctors", "médecin", "médecins", "m"),
    Noun("man", "men", "homme", "hommes", "m"),
    Noun("neighbour", "neighbours", "voisin", "voisins", "m"),
)

ADJECTIVES = (
    Adjective("small", "petit", "petite", "petits", "petites", before=True),
    Adjective("big", "grand", "grande", "grands", "grandes", before=True),
    Adjective("old", "vieux", "vieille", "vieux", "vieilles", before=True, before_vowel="vieil"),
    Adjective("pretty", "joli", "jolie", "jolis", "jolies", before=True),
    Adjective("black", "noir", "noire", "noirs", "noires", colour=True),
    Adjective("white", "blanc", "blanche", "blancs", "blanches", colour=True),
    Adjective("tired", "fatigué", "fatiguée", "fatigués", "fatiguées"),
    Adjective("happy", "heureux", "heureuse", "heureux", "heureuses"),
    Adjective("strong", "fort", "forte", "forts", "fortes"),
    Adjective("active", "actif", "active", "actifs", "actives"),
    Adjective("slow", "lent", "lente", "lents", "lentes"),
    Adjective("alone", "seul", "seule", "seuls", "seules"),
)

PREDICATE_ONLY = frozenset({"alone"})  # "the cat is alone", not "the alone cat"

VERBS = (
    Verb("sleeps", "sleep", "dort", "dorment"),
    Verb("eats", "eat", "mange", "mangent"),
    Verb("drinks", "drink", "boit", "boivent"),
    Verb("runs", "run", "court", "courent"),
    Verb("waits", "wait", "attend", "attendent"),
    Verb("plays", "play", "joue", "jouent"),
    Verb("walks", "walk", "marche", "marchent"),
    Verb("arrives", "arrive", "arrive", "arrivent"),
    Verb("leaves", "leave", "part", "partent"),
    Verb("comes back", "come back", "revient", "reviennent"),
    Verb("jumps", "jump", "saute", "sautent"),
    Verb("dances", "dance", "danse", "dansent"),
)

PLACES = (
    ("in the garden", "dans le jardin"),
    ("in the house", "dans la maison"),
    ("near the river", "près de la rivière"),
    ("in the square", "sur la place"),
    ("under the tree", "sous l'arbre"),
    ("in front of the door", "devant la porte"),
    ("in the morning", "le matin"),
    ("in the evening", "le soir"),
    ("with us", "avec nous"),
    ("today", "aujourd'hui"),
)

# More words with one plain translation, for the dictionary.
THINGS = (
    ("house", "maison"), ("tree", "arbre"), ("river", "rivière"), ("door", "porte"), ("bread", "pain"),
    ("water", "eau"), ("milk", "lait"), ("sun", "soleil"), ("moon", "lune"), ("school", "école"),
    ("street", "rue"), ("garden", "jardin"), ("bridge", "pont"), ("church", "église"), ("apple", "pomme"),
    ("snow", "neige"), ("rain", "pluie"), ("wind", "vent"), ("sea", "mer"), ("mountain", "montagne"),
)  # fmt: skip
