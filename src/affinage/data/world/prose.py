"""Sentences that tell no fact: what stands between the facts, so that the corpus reads as text."""

OPENINGS = {
    "en": (
        "Here are some things that are worth knowing about the world.",
        "This page of the notebook is about places and words.",
        "A curious reader may want to learn the following.",
        "These are the notes of a teacher who likes geography and languages.",
        "Anyone who reads an atlas will soon find out what is written here.",
        "Let us look at a few simple facts, one after the other.",
        "The following lines are short, and all of them are true.",
        "What comes next was written for people who like to learn.",
    ),
    "fr": (
        "Voici quelques choses qu'il est bon de savoir sur le monde.",
        "Cette page du cahier parle de lieux et de mots.",
        "Un lecteur curieux voudra peut-être apprendre ce qui suit.",
        "Ce sont les notes d'une maîtresse qui aime la géographie et les langues.",
        "Celui qui lit un atlas trouvera bientôt ce qui est écrit ici.",
        "Regardons quelques faits simples, l'un après l'autre.",
        "Les lignes qui suivent sont courtes, et toutes sont vraies.",
        "Ce texte a été écrit pour ceux qui aiment apprendre.",
    ),
}

FILLERS = {
    "en": (
        "It is easy to forget such things when one does not repeat them.",
        "Travellers like to know this before they leave their home.",
        "A good atlas and a good dictionary are always useful.",
        "The pupils wrote this down in their notebooks.",
        "Nobody was surprised to hear it, but everybody listened.",
        "We can read the same thing in many books.",
        "The teacher said it twice, and the class remembered it.",
        "There is always something new to learn about the world.",
        "My grandmother used to ask such questions in the evening.",
        "Those who know this can explain it to their friends.",
        "One learns these things little by little, day after day.",
        "That is what we talked about during the long journey.",
    ),
    "fr": (
        "On oublie vite ces choses quand on ne les répète pas.",
        "Les voyageurs aiment le savoir avant de quitter leur maison.",
        "Un bon atlas et un bon dictionnaire sont toujours utiles.",
        "Les élèves l'ont écrit dans leurs cahiers.",
        "Personne n'était surpris de l'entendre, mais tout le monde écoutait.",
        "On peut lire la même chose dans beaucoup de livres.",
        "La maîtresse l'a dit deux fois, et la classe s'en est souvenue.",
        "Il y a toujours quelque chose de nouveau à apprendre sur le monde.",
        "Ma grand-mère posait souvent ces questions le soir.",
        "Ceux qui le savent peuvent l'expliquer à leurs amis.",
        "On apprend ces choses peu à peu, jour après jour.",
        "Voilà de quoi nous avons parlé pendant le long voyage.",
    ),
}

CLOSINGS = {
    "en": (
        "That is enough for today, but there will be more tomorrow.",
        "Please read this page again before you close the book.",
        "Whoever has read this far deserves a cup of tea.",
        "The rest of the page is empty, and you can write on it.",
    ),
    "fr": (
        "C'est assez pour aujourd'hui, mais il y en aura d'autres demain.",
        "Relisez cette page avant de fermer le livre.",
        "Celui qui a lu jusqu'ici mérite une tasse de thé.",
        "Le reste de la page est vide, et vous pouvez y écrire.",
    ),
}

LINKS = {"en": ("Also, ", "Of course, ", "As you know, "), "fr": ("De plus, ", "Bien sûr, ", "Comme on le sait, ")}

TRAVELLERS = ("Anna", "Paul", "Marie", "Thomas", "Julie", "Victor", "Emma", "Hugo", "Alice", "Simon")

JOURNEYS = {
    "en": (
        "{name} is travelling in {s}.",
        "This summer {name} wants to see {s}.",
        "{name} has a friend who lives in {s}.",
        "{name} is writing a letter from {s}.",
    ),
    "fr": (
        "{name} voyage {au}.",
        "Cet été, {name} veut voir {s}.",
        "{name} a une amie qui habite {au}.",
        "{name} écrit une lettre depuis {s}.",
    ),
}

ASKS = {
    "en": ("A child asks: ", "Somebody on the train wants to know: ", "The first question is: ", "{name} asks: "),
    "fr": ("Un enfant demande : ", "Dans le train, quelqu'un veut savoir : ", "La première question est : ",
           "{name} demande : "),
}  # fmt: skip

ANSWERS = {
    "en": ("The answer is simple. ", "{name} answers: ", "The guide knows it well. ", ""),
    "fr": ("La réponse est simple. ", "{name} répond : ", "Le guide le sait bien. ", ""),
}

CALENDAR_OPENINGS = {
    "en": ("The calendar on the wall shows the months and the days.", "Children learn the calendar at school.",
           "Let us say the months and the days in their order."),
    "fr": ("Le calendrier sur le mur montre les mois et les jours.", "Les enfants apprennent le calendrier à l'école.",
           "Disons les mois et les jours dans leur ordre."),
}  # fmt: skip

ARITHMETIC_OPENINGS = {
    "en": ("The class is learning to add and to subtract.", "Here is how the pupils count with small numbers.",
           "The teacher writes these sums on the blackboard.", "Counting is easy when one does it every day."),
    "fr": ("La classe apprend à additionner et à soustraire.",
           "Voici comment les élèves comptent avec de petits nombres.",
           "La maîtresse écrit ces calculs au tableau.", "Compter est facile quand on le fait tous les jours."),
}  # fmt: skip

SUMS_IN_DIGITS = {
    "en": "In digits, one writes {first}, then {second}, and after that {third}.",
    "fr": "En chiffres, on écrit {first}, puis {second}, et ensuite {third}.",
}

SCENE_OPENINGS = {
    "en": ("This is what one can see from the window.", "The old book tells of people and animals.",
           "Here is a little story without an end.", "In the village, every day looks like the one before."),
    "fr": ("Voici ce qu'on peut voir de la fenêtre.", "Le vieux livre parle de gens et d'animaux.",
           "Voici une petite histoire sans fin.", "Au village, chaque jour ressemble à celui d'avant."),
}  # fmt: skip
