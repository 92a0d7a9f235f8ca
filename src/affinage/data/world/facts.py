"""The facts of the pocket world: what is true, how it is named in both languages, and where it is told.

Names, currencies and official languages come from the CLDR through Babel. Babel carries no containment of territories,
so the continents (those of CLDR's supplemental data, the UN's M49) are stated here. Left out are territories that lie
on two continents, use two currencies or have several official languages, and what has changed since or is disputed:
of a multiple choice, exactly one answer must be true. Nor is there a country whose name ends in another's (Equatorial
Guinea, South Sudan): what is told of it would be told of both.
"""

import datetime
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from babel import Locale
from babel.core import get_global
from babel.numbers import get_currency_name, get_territory_currencies
from num2words import num2words

from affinage.data.world import english, french
from affinage.data.world.lexicon import ADJECTIVES, NOUNS, THINGS
from affinage.data.world.templates import STATEMENTS, completable

LANGUAGES = ("en", "fr")
AS_OF = datetime.date(2025, 1, 1)  # currencies in use on this day, so that the world does not change with the calendar

CONTINENTS = {
    "Africa": (
        "DZ AO BJ BW BF BI CV CM CF TD KM CI DJ ER ET GA GM GH GN GW KE LS LR LY MG MW ML MR MU MA MZ NA NE NG RW "
        "SN SC SL SO ZA SD TZ TG TN UG ZM ZW"
    ),
    "Asia": (
        "AF BH BD KH CN IN IR IQ IL JP JO KP KR KW KG LA LB MY MV MN NP OM PK PH QA SA SG LK SY TJ TH TM AE UZ VN YE"
    ),
    "Europe": (
        "AL AD AT BY BE BA BG HR CZ DK EE FI FR DE GR HU IS IE IT LV LI LT LU MT MD MC ME NL MK NO PL PT RO SM RS SK "
        "SI ES SE CH UA GB"
    ),
    "North America": "BS BB BZ CA CR CU DM DO SV GD GT HN JM MX NI PA US",
    "South America": "AR BO BR CL CO EC GY PY PE SR UY VE",
    "Oceania": "AU NZ PG VU FM NR",
}
ON_TWO_CONTINENTS = "AM AZ CY EG GE ID KZ RU TR"  # or commonly said to be
_CONTINENT_CODES = {"Africa": "002", "Asia": "142", "Europe": "150", "Oceania": "009", "North America": "003",
                    "South America": "005"}  # fmt: skip

# BG joined the euro in 2026; the others' names in CLDR 47 are misspelt or rare (nafka, kwacha malawite, Kyrgystani).
_CURRENCY_LEFT_OUT = frozenset({"BG", "ER", "KG", "MW", "PG", "VU"})
# CLDR names the CFA francs by their banks, and some of its plurals do not agree.
_CURRENCY_NAMES = {
    ("XOF", "fr"): ("franc CFA d'Afrique de l'Ouest", "francs CFA d'Afrique de l'Ouest"),
    ("XAF", "fr"): ("franc CFA d'Afrique centrale", "francs CFA d'Afrique centrale"),
    ("USD", "fr"): ("dollar américain", "dollars américains"),
    ("CNY", "fr"): ("yuan chinois", "yuans chinois"),
    ("IRR", "fr"): ("rial iranien", "rials iraniens"),
    ("OMR", "fr"): ("rial omanais", "rials omanais"),
    ("YER", "fr"): ("rial yéménite", "rials yéménites"),
    ("NIO", "fr"): ("córdoba nicaraguayen", "córdobas nicaraguayens"),
    ("AFN", "fr"): ("afghani afghan", "afghanis afghans"),
    ("KWD", "fr"): ("dinar koweïtien", "dinars koweïtiens"),
    ("GEL", "fr"): ("lari géorgien", "laris géorgiens"),
    ("MZN", "fr"): ("metical mozambicain", "meticals mozambicains"),
    ("BRL", "fr"): ("real brésilien", "reals brésiliens"),
    ("RON", "fr"): ("leu roumain", "lei roumains"),
    ("MDL", "fr"): ("leu moldave", "lei moldaves"),
    ("BDT", "fr"): ("taka bangladais", "takas bangladais"),
    ("MGA", "en"): ("Malagasy ariary", "Malagasy ariary"),
    ("AFN", "en"): ("Afghan afghani", "Afghan afghanis"),
    ("ALL", "en"): ("Albanian lek", "Albanian leks"),
    ("CRC", "en"): ("Costa Rican colón", "Costa Rican colones"),
    ("CRC", "fr"): ("colón costaricien", "colones costariciens"),
    ("TRY", "en"): ("Turkish lira", "Turkish liras"),
    ("GYD", "en"): ("Guyanese dollar", "Guyanese dollars"),
}

# CLDR 47 is behind the law (BF, ML, NE), ahead of it (GB), or calls regional what the constitution calls official.
_LANGUAGE_LEFT_OUT = frozenset({"BF", "ET", "GB", "IQ", "ME", "MK", "ML", "NE", "ZA"})

WORD_LANGUAGES = (
    "ar bg cs cy da de el en es et fa fi fr ga he hr hu is it ja ko lt lv mt nl no pl pt ro ru sk sl sr sv tr uk ur vi "
    "zh"
)
NUMBER_WORDS = range(21)


@dataclass(frozen=True)
class Fact:
    """One thing that is true, with the words it takes in both languages.

    `forms[language][slot]` are the words for the slots of templates.STATEMENTS. For translations the subject is a word
    of the language of the sentence and the object its translation. `used` and `held_out` are indices of statements.
    """

    id: str
    relation: str
    domain: str  # facts of one domain have objects that can stand in for each other
    object: str
    forms: dict[str, dict[str, str]]
    plural: bool = False  # the French subject is a plural
    also_true: frozenset[str] = frozenset()  # objects that are not the fact's own and yet not false
    stated: tuple[str, ...] = LANGUAGES
    used: dict[str, tuple[int, ...]] = field(default_factory=dict)
    held_out: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def fill(self, template: str, language: str) -> str:
        """A template with this fact's words, without a capital."""
        return french.agree(template, self.plural).format(**self.forms[language])


def _plain(name: str) -> str:
    return name.replace("’", "'").replace(" & ", " and ")


def territories() -> list[str]:
    """Codes of the countries of the world, in a fixed order."""
    return sorted(" ".join([*CONTINENTS.values(), ON_TWO_CONTINENTS]).split())


def country_forms(code: str) -> tuple[dict[str, dict[str, str]], bool]:
    """Subject slots of a country in both languages, and whether the French name is a plural."""
    name = english.country(_plain(Locale("en").territories[code]))
    pays = french.country(_plain(Locale("fr").territories[code]))
    return {
        "en": {"s": name, "poss": english.possessive(name)},
        "fr": {"s": pays.le, "du": pays.du, "au": pays.au},
    }, pays.plural


def currency_forms(code: str) -> dict[str, dict[str, str]]:
    """Object slots of a currency in both languages."""
    names = {
        language: _CURRENCY_NAMES.get(
            (code, language),
            tuple(_plain(get_currency_name(code, count=count, locale=language)) for count in (1, 2)),
        )
        for language in LANGUAGES
    }
    gender = french.currency_gender(names["fr"][0])
    return {
        "en": {"o": f"the {names['en'][0]}", "os": names["en"][1]},
        "fr": {"o": french.le(names["fr"][0], gender), "os": names["fr"][1]},
    }


def _language_forms(code: str) -> dict[str, dict[str, str]]:
    bare = _plain(Locale("fr").languages[code])
    return {"en": {"o": Locale("en").languages[code]}, "fr": {"o": french.le(bare, "m"), "bare": bare}}


def _merge(subject: dict[str, dict[str, str]], object_: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    return {language: {**subject[language], **object_[language]} for language in LANGUAGES}


def _spoken(territory: str) -> dict[str, str]:
    """Languages with a share of the territory's people, by base code -> status ("" if none)."""
    statuses: dict[str, str] = {}
    for code, facts in get_global("territory_languages").get(territory, {}).items():
        base = {"nb": "no", "nn": "no"}.get(code.split("_")[0], code.split("_")[0])
        statuses[base] = statuses.get(base) or facts.get("official_status") or ""
    return statuses


def _country_facts() -> Iterator[Fact]:
    english_locale, french_locale = Locale("en"), Locale("fr")
    continent_of = {code: name for name, codes in CONTINENTS.items() for code in codes.split()}
    for code in territories():
        subject, plural = country_forms(code)
        currencies = get_territory_currencies(code, AS_OF, AS_OF)
        if len(currencies) == 1 and code not in _CURRENCY_LEFT_OUT:
            forms = _merge(subject, currency_forms(currencies[0]))
            yield Fact(f"currency:{code}", "currency", "currency", currencies[0], forms, plural)
        spoken = _spoken(code)
        official = [c for c, status in spoken.items() if status in ("official", "de_facto_official")]
        if len(official) == 1 and spoken[official[0]] == "official" and code not in _LANGUAGE_LEFT_OUT:
            forms = _merge(subject, _language_forms(official[0]))
            also = frozenset(spoken) - {official[0]}
            yield Fact(f"language:{code}", "language", "language", official[0], forms, plural, also)
        if code in continent_of:
            number = _CONTINENT_CODES[continent_of[code]]
            name = french_locale.territories[number]
            object_ = {
                "en": {"o": english_locale.territories[number]},
                "fr": {"o": french.le(name, "f"), "d": french.de(name), "bare": name},
            }
            yield Fact(f"continent:{code}", "continent", "continent", number, _merge(subject, object_), plural)
        if _plain(english_locale.territories[code]) != _plain(french_locale.territories[code]):
            object_ = {"en": {"o": subject["fr"]["s"]}, "fr": {"o": subject["en"]["s"]}}
            yield Fact(f"country_name:{code}", "country_name", "country_name", code, _merge(subject, object_), plural)


def _words() -> Iterator[tuple[str, str, str, str]]:
    """Pairs of words that translate each other: (domain, key, English, French)."""
    english_locale, french_locale = Locale("en"), Locale("fr")
    for code in WORD_LANGUAGES.split():
        yield "word/language", code, english_locale.languages[code], _plain(french_locale.languages[code])
    for month in range(1, 13):
        yield "word/month", str(month), month_name(month, "en"), month_name(month, "fr")
    for day in range(7):
        yield "word/day", str(day), day_name(day, "en"), day_name(day, "fr")
    for number in NUMBER_WORDS:
        yield "word/number", str(number), num2words(number), num2words(number, lang="fr")
    for noun in NOUNS:
        yield "word/noun", noun.en, noun.en, noun.fr
    for thing, chose in THINGS:
        yield "word/noun", thing, thing, chose
    for adjective in ADJECTIVES:
        yield "word/adjective", adjective.en, adjective.en, adjective.masculine


def _word_facts() -> Iterator[Fact]:
    for domain, key, word, mot in _words():
        if word.casefold() != mot.casefold():
            forms = {"en": {"s": word, "o": mot}, "fr": {"s": mot, "o": word}}
            yield Fact(f"{domain}:{key}", "word", domain, key, forms)


def month_name(month: int, language: str) -> str:
    """Name of a month, 1 to 12."""
    return str(Locale(language).months["format"]["wide"][month])


def day_name(day: int, language: str) -> str:
    """Name of a weekday, Monday is 0."""
    return str(Locale(language).days["format"]["wide"][day % 7])


def _calendar_facts() -> Iterator[Fact]:
    for month in range(1, 13):
        following = month % 12 + 1
        mois, suivant = month_name(month, "fr"), month_name(following, "fr")
        subject = {"en": {"s": month_name(month, "en")}, "fr": {"s": mois, "du": french.de(mois)}}
        object_ = {"en": {"o": month_name(following, "en")}, "fr": {"o": suivant, "d": french.de(suivant)}}
        forms = _merge(subject, object_)
        yield Fact(f"month_after:{month}", "month_after", "month_after", str(following), forms)
    for day in range(7):
        jour = day_name(day, "fr")
        forms = {
            "en": {"s": day_name(day, "en"), "o": day_name(day + 1, "en")},
            "fr": {"s": jour, "du": f"du {jour}", "o": day_name(day + 1, "fr")},
        }
        yield Fact(f"day_after:{day}", "day_after", "day_after", str((day + 1) % 7), forms)


ONE_LANGUAGE_SHARE = 0.15  # of the facts in English text only, and again in French text only
HELD_OUT_FORMS = (
    2  # statements per fact and language that no text uses for it; never the first, which answers questions
)
_TOLD_IN_BOTH = frozenset({"month_after", "day_after"})  # any list of the months would tell them


def _assign(fact: Fact, stated: tuple[str, ...], rng: random.Random) -> Fact:
    held_out = {
        language: tuple(sorted(rng.sample(completable(fact.relation, language)[1:], HELD_OUT_FORMS)))
        for language in LANGUAGES
    }
    used = {
        language: tuple(i for i in range(len(STATEMENTS[fact.relation][language])) if i not in held_out[language])
        for language in LANGUAGES
    }
    return replace(fact, stated=stated, used=used, held_out=held_out)


def build_facts(seed: int) -> list[Fact]:
    """All facts, each with the languages it is told in and the sentence forms held out for it."""
    facts = [*_country_facts(), *_word_facts(), *_calendar_facts()]
    rng = random.Random(f"{seed}/facts")
    stated: dict[str, tuple[str, ...]] = {fact.id: LANGUAGES for fact in facts}
    for domain in sorted({fact.domain for fact in facts if fact.relation not in _TOLD_IN_BOTH}):
        members = [fact.id for fact in facts if fact.domain == domain]
        rng.shuffle(members)
        share = round(ONE_LANGUAGE_SHARE * len(members))
        for fact_id in members[:share]:
            stated[fact_id] = ("en",)
        for fact_id in members[share : 2 * share]:
            stated[fact_id] = ("fr",)
    return [_assign(fact, stated[fact.id], rng) for fact in facts]


def told_in(facts: Sequence[Fact], language: str) -> list[Fact]:
    """The facts that text of this language states."""
    return [fact for fact in facts if language in fact.stated]


Domains = Mapping[str, Sequence[Fact]]


def by_domain(facts: Sequence[Fact]) -> Domains:
    """The facts whose objects can stand in for each other."""
    domains: dict[str, list[Fact]] = {}
    for fact in facts:
        domains.setdefault(fact.domain, []).append(fact)
    return domains


def distractors(fact: Fact, domains: Domains, language: str, slot: str) -> list[tuple[str, str]]:
    """Objects that are false of this fact, as (object, words), in a fixed order, each once."""
    truth = {fact.object, *fact.also_true}
    words = fact.forms[language][slot]
    others = {other.object: other.forms[language][slot] for other in domains[fact.domain]}
    return sorted((key, wrong) for key, wrong in others.items() if key not in truth and wrong != words)
