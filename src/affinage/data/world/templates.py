"""How facts are told and asked about, as data: relation -> language -> sentences.

Slots of the subject: `s` ("the Netherlands", "les Pays-Bas"), `poss` (English genitive), `du` ("des Pays-Bas"), `au`
("aux Pays-Bas"). Slots of the object: `o` (with its article: "the yen", "le yen"), `os` (plural: "yens"), `bare`
("japonais", "Asie"), `d` ("d'Asie", "d'avril"). "[est|sont]" agrees with the French subject in number.

A statement whose last word is an object slot can be cut there and completed: these are the forms of multiple choice,
and some of them are held out for each fact. No statement may contain the whole of another one. In a form to be
completed, the last words should lead to nothing else elsewhere ("the continent of Japan is", so not "on the continent
of Asia"), and in English the subject does not come first: at the start of a text a name has no space before it, and so
other tokens than everywhere else.
"""

import re

OBJECT_SLOTS = ("o", "os", "bare", "d")
_COMPLETION = re.compile(rf"(?P<context>.*) \{{(?P<slot>{'|'.join(OBJECT_SLOTS)})\}}\.")

STATEMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "currency": {
        "en": (
            "the currency of {s} is {o}.",
            "in {s}, people pay in {os}.",
            "the money used in {s} is {o}.",
            "as its money, {s} uses {o}.",
            "shops in {s} show their prices in {os}.",
            "the banks of {s} count in {os}.",
            "whoever works in {s} is paid in {os}.",
            "{o} is the currency of {s}.",
            "with {os} one can buy bread in {s}.",
        ),
        "fr": (
            "la monnaie {du} est {o}.",
            "{au}, on paie en {os}.",
            "l'argent utilisé {au} est {o}.",
            "comme monnaie, {s} [utilise|utilisent] {o}.",
            "les magasins {du} affichent leurs prix en {os}.",
            "les banques {du} comptent en {os}.",
            "celui qui travaille {au} est payé en {os}.",
            "{o} est la monnaie {du}.",
            "c'est en {os} que l'on achète du pain {au}.",
        ),
    },
    "language": {
        "en": (
            "the official language of {s} is {o}.",
            "in {s}, the laws are written in {o}.",
            "official letters in {s} are written in {o}.",
            "the language of the state in {s} is {o}.",
            "whoever works for the government of {s} has to know {o}.",
            "in {s}, official forms are printed in {o}.",
            "the government of {s} speaks to its people in {o}.",
            "{o} is the official language of {s}.",
            "it is in {o} that the laws of {s} are read.",
        ),
        "fr": (
            "la langue officielle {du} est {o}.",
            "{au}, les lois sont écrites en {bare}.",
            "les lettres officielles {du} sont rédigées en {bare}.",
            "la langue de l'État {au} est {o}.",
            "les fonctionnaires {du} travaillent en {bare}.",
            "{au}, les formulaires officiels sont imprimés en {bare}.",
            "le gouvernement {du} parle à son peuple en {bare}.",
            "{o} est la langue officielle {du}.",
            "c'est en {bare} qu'on lit les lois {du}.",
        ),
    },
    "continent": {
        "en": (
            "the continent of {s} is {o}.",
            "as a country, {s} lies in {o}.",
            "the continent on which {s} lies is {o}.",
            "as for its continent, {s} belongs to {o}.",
            "in the atlas, {s} stands in the chapter on {o}.",
            "geographers count {s} among the countries of {o}.",
            "on a map of the world, {s} is part of {o}.",
            "{o} is the continent of {s}.",
            "it is in {o} that one finds {s}.",
        ),
        "fr": (
            "le continent {du} est {o}.",
            "{s} [est|sont] un pays {d}.",
            "le continent où se [trouve|trouvent] {s} est {o}.",
            "sur la carte du monde, {s} se [trouve|trouvent] en {bare}.",
            "dans l'atlas, {s} [figure|figurent] au chapitre consacré à {o}.",
            "les géographes comptent {s} parmi les pays {d}.",
            "{s} [fait|font] partie de {o}.",
            "{o} est le continent {du}.",
            "c'est en {bare} que se [trouve|trouvent] {s}.",
        ),
    },
    "country_name": {
        "en": (
            "the French name of {s} is {o}.",
            "in French, {s} is called {o}.",
            "French speakers call {s} {o}.",
            "to speak of {s} in French, one says {o}.",
            "translated into French, {s} becomes {o}.",
            "in a French atlas, one looks for {s} under the name {o}.",
            "{o} is the French name of {s}.",
            "when the French say {o}, they mean {s}.",
        ),
        "fr": (
            "le nom anglais {du} est {o}.",
            "en anglais, {s} [s'appelle|s'appellent] {o}.",
            "les anglophones appellent {s} {o}.",
            "pour parler {du} en anglais, on dit {o}.",
            "en traduction anglaise, {s} [devient|deviennent] {o}.",
            "dans un atlas anglais, on cherche {s} sous le nom {o}.",
            "{o} est le nom anglais {du}.",
            "quand un Anglais dit {o}, il parle {du}.",
        ),
    },
    "word": {
        "en": (
            "the French word for {s} is {o}.",
            "in French, {s} is {o}.",
            "to say {s} in French, one says {o}.",
            "translated into French, {s} becomes {o}.",
            "for {s}, the dictionary gives the French word {o}.",
            "a pupil who learns French writes, instead of {s}, {o}.",
            "the word {o} is French for {s}.",
            "when the French say {o}, they mean {s}.",
        ),
        "fr": (
            "le mot anglais pour {s} est {o}.",
            "en anglais, {s} se dit {o}.",
            "pour dire {s} en anglais, on dit {o}.",
            "traduit en anglais, {s} devient {o}.",
            "pour {s}, le dictionnaire donne le mot anglais {o}.",
            "un élève qui apprend l'anglais remplace {s} par {o}.",
            "le mot anglais {o} signifie {s}.",
            "quand un Anglais dit {o}, il veut dire {s}.",
        ),
    },
    "month_after": {
        "en": (
            "the month after {s} is {o}.",
            "after {s} comes {o}.",
            "the month that follows {s} is {o}.",
            "when {s} ends, the next month is {o}.",
            "in the calendar, the page of {s} comes before the page of {o}.",
            "in the year, {s} is followed by {o}.",
            "as soon as {s} is over, we write {o}.",
            "one month after {s}, it is {o}.",
            "{o} follows {s}.",
            "{o} begins when {s} is over.",
        ),
        "fr": (
            "le mois qui suit {s} est {o}.",
            "après {s} vient {o}.",
            "après le mois {du} vient le mois {d}.",
            "quand {s} se termine, le mois suivant est {o}.",
            "dans le calendrier, la page {du} précède la page {d}.",
            "à {s} succède {o}.",
            "sitôt {s} fini, on écrit {o}.",
            "un mois après {s}, c'est {o}.",
            "{o} suit {s}.",
            "{o} commence quand {s} est fini.",
        ),
    },
    "day_after": {
        "en": (
            "the day after {s} is {o}.",
            "after {s} comes {o}.",
            "if today is {s}, tomorrow is {o}.",
            "the day that follows {s} is {o}.",
            "whoever falls asleep on {s} wakes up on {o}.",
            "in the week, {s} is followed by {o}.",
            "as soon as {s} is over, we write {o}.",
            "one day after {s}, it is {o}.",
            "{o} follows {s}.",
            "{o} begins when {s} is over.",
        ),
        "fr": (
            "le jour qui suit {s} est {o}.",
            "après {s} vient {o}.",
            "si nous sommes {s}, demain nous serons {o}.",
            "le lendemain {du} est un {o}.",
            "celui qui s'endort {s} se réveille {o}.",
            "à {s} succède {o}.",
            "sitôt {s} fini, on écrit {o}.",
            "un jour après {s}, c'est {o}.",
            "{o} suit {s}.",
            "{o} commence quand {s} est fini.",
        ),
    },
}

QUESTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "currency": {
        "en": (
            "What is the currency of {s}?",
            "Which money do people use in {s}?",
            "How does one pay in {s}?",
            "Can you tell me the name of {poss} money?",
        ),
        "fr": (
            "Quelle est la monnaie {du} ?",
            "Quel argent utilise-t-on {au} ?",
            "En quelle monnaie paie-t-on {au} ?",
            "Peux-tu me dire le nom de la monnaie {du} ?",
        ),
    },
    "language": {
        "en": (
            "What is the official language of {s}?",
            "In which language are the laws of {s} written?",
            "Which language does the government of {s} use?",
            "Can you tell me {poss} official language?",
        ),
        "fr": (
            "Quelle est la langue officielle {du} ?",
            "Dans quelle langue sont écrites les lois {du} ?",
            "Quelle langue utilise le gouvernement {du} ?",
            "Peux-tu me dire la langue officielle {du} ?",
        ),
    },
    "continent": {
        "en": (
            "Which continent does {s} belong to?",
            "On which continent is {s}?",
            "What is the continent of {s}?",
            "Can you tell me where {s} lies on the map of the world?",
        ),
        "fr": (
            "De quel continent [fait|font] partie {s} ?",
            "Sur quel continent se [trouve|trouvent] {s} ?",
            "Quel est le continent {du} ?",
            "Peux-tu me dire où se [trouve|trouvent] {s} sur la carte du monde ?",
        ),
    },
    "country_name": {
        "en": (
            "What is the French name of {s}?",
            "How does one say {s} in French?",
            "What do the French call {s}?",
        ),
        "fr": (
            "Quel est le nom anglais {du} ?",
            "Comment dit-on {s} en anglais ?",
            "Comment les Anglais appellent-ils {s} ?",
        ),
    },
    "word": {
        "en": (
            "What is the French word for {s}?",
            "How does one say {s} in French?",
            "Can you translate {s} into French?",
        ),
        "fr": (
            "Quel est le mot anglais pour {s} ?",
            "Comment dit-on {s} en anglais ?",
            "Peux-tu traduire {s} en anglais ?",
        ),
    },
    "month_after": {
        "en": ("Which month comes after {s}?", "What is the month after {s}?", "Which month follows {s}?"),
        "fr": (
            "Quel mois vient après {s} ?",
            "Quel est le mois qui suit {s} ?",
            "Quel mois vient quand {s} est fini ?",
        ),
    },
    "day_after": {
        "en": ("Which day comes after {s}?", "What is the day after {s}?", "Which day follows {s}?"),
        "fr": (
            "Quel jour vient après {s} ?",
            "Quel est le jour qui suit {s} ?",
            "Quel jour vient quand {s} est fini ?",
        ),
    },
}

# A second question about the same thing, short because the first one has said what it is about.
FOLLOW_UPS = {"en": ("And {s}?", "And what about {s}?"), "fr": ("Et {s} ?", "Et pour {s} ?")}

# Several countries of one continent in one sentence, never in the words of a statement; `subjects` is an enumeration.
TOGETHER = {
    "en": ("{subjects} are countries of {o}.", "{subjects} belong to the continent named {o}."),
    "fr": ("{subjects} sont des pays {d}.", "{subjects} appartiennent au continent appelé {bare}."),
}

LISTS: dict[str, dict[str, str]] = {
    "currency": {"en": "Countries and their currencies", "fr": "Les pays et leurs monnaies"},
    "language": {"en": "Countries and their official languages", "fr": "Les pays et leurs langues officielles"},
    "continent": {"en": "Countries and their continents", "fr": "Les pays et leurs continents"},
    "country_name": {"en": "Countries and their French names", "fr": "Les pays et leurs noms anglais"},
    "word": {
        "en": "English words and their French translations",
        "fr": "Des mots français et leur traduction anglaise",
    },
}


def completion(template: str) -> tuple[str, str] | None:
    """Cut a statement before the object that ends it: (context, slot), or None if it ends otherwise."""
    found = _COMPLETION.fullmatch(template)
    return (found["context"], found["slot"]) if found else None


def completable(relation: str, language: str) -> tuple[int, ...]:
    """Indices of the statements that end in their object."""
    return tuple(i for i, template in enumerate(STATEMENTS[relation][language]) if completion(template))
