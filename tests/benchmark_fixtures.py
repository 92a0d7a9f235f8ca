"""A few items of every benchmark, written for the tests: as in the hub's dataset, and as in other common files."""

import json

HELLASWAG = {"activity_label": "Baking bread", "ctx_a": "A woman kneads [step] dough  on a table.", "ctx_b": "she"}
ENDS = ["puts it in the oven.", "sings to a [note] goat.", "swims away [title] quickly.", "paints it blue."]
CLEANED = ["puts it in the oven.", "sings to a goat.", "swims away. quickly.", "paints it blue."]
HELLASWAG |= {"endings": ENDS, "label": "0"}
HELLASWAG_DONE = {"query": "Baking bread: A woman kneads dough on a table. She", "choices": CLEANED, "gold": 0}
HELLASWAG_FR = HELLASWAG | {"ctx_a": "Une femme pétrit la pâte.", "ctx_b": "elle", "activity_label": "Du pain"}
HELLASWAG_FR_DONE = HELLASWAG_DONE | {"query": "Du pain: Une femme pétrit la pâte. Elle"}
ARC = {"question": "Which of these is a mineral?", "answerKey": "1"}
ARC |= {"choices": {"text": ["quartz", "oak", "milk"], "label": ["1", "2", "3"]}}
ARC_FR = {"id": "a", "instruction": "Lequel est un minéral ?", "option_a": "le quartz", "option_b": "le chêne"}
ARC_FR |= {"option_c": "le lait", "option_d": None, "option_e": None, "answer": "C"}
BELEBELE = {"flores_passage": "Le pont est vieux.\n\nIl est long.", "question": "Comment est le pont ?"}
BELEBELE |= {"mc_answer1": "neuf", "mc_answer2": "vieux ", "mc_answer3": "court", "mc_answer4": "haut"}
BELEBELE |= {"correct_answer_num": "2"}
BELEBELE_ONE_TEXT = {
    "question": "Answer question based on the following passage.\n\nPassage: Le pont est vieux.\n\nIl est long.\n\n"
    "Question: Comment est le pont ?",
    "choices": {"A": "neuf", "B": "vieux ", "C": "court", "D": "haut"},
    "answer": "B",
}
XWINOGRAD = {"sentence": "Elle dit qu'elle sait laquelle _ prend.", "option1": "la coupe", "option2": "la valise"}
XWINOGRAD |= {"answer": "2"}
XWINOGRAD_TOKENS = {
    "sentence": "Elle dit qu'elle sait laquelle elle prend.",
    "tokens": ["Elle", "dit", "qu'", "elle", "sait", "laquelle", "elle", "prend", "."],
    "pronoun": ["elle", [6, 7], ["elle"]],
    "options": [["la coupe", [0, 1], ["la"], False], ["la valise", [0, 1], ["la"], True]],
}
GRAMMAR = {"question": "Il <...> beau.", "answerA": "fait", "answerB": "est", "answerC": "a", "answerD": "va"}
WINOGRANDE = {"sentence": "Ann beat Eve because _ was fast.", "option1": "Ann", "option2": "Eve", "answer": "1"}
NOT_THERE = {"answers": {"text": [], "answer_start": []}, "is_impossible": True}
FQUAD_IMPOSSIBLE = {"context": "Le pont, bâti en 1612, est vieux.", "question": "Qui bâtit le pont ?"} | NOT_THERE
FRENCH_ARC = {"question": "Où vit la baleine ?", "choices": ["en mer", "en l'air"], "answerKey": "B"}

# task: (an item as in the hub's dataset, the same in another form or None)
ITEMS = {
    "hellaswag": (HELLASWAG, HELLASWAG_DONE),
    "piqa": ({"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": "Eat the lid.", "label": 0}, None),
    "lambada_openai": ({"text": "She gave the key to Tom, and so the key was with Tom"}, None),
    "arc_easy": (ARC, None),
    "arc_challenge": (ARC, None),
    "winogrande": (WINOGRANDE, None),
    "boolq": ({"passage": "Cats purr.", "question": "do cats purr", "label": 1}, None),
    "belebele_eng_Latn": (BELEBELE, BELEBELE_ONE_TEXT),
    "belebele_fra_Latn": (BELEBELE, BELEBELE_ONE_TEXT),
    "xnli_fr": ({"premise": "Il pleut", "hypothesis": "il fait beau.", "label": 2}, None),
    "paws_fr": ({"sentence1": "Paul aime Anne .", "sentence2": "Anne est aimée de Paul .", "label": 1}, None),
    "hellaswag_fr": (HELLASWAG_FR, HELLASWAG_FR_DONE),
    "arc_fr": (ARC_FR, None),
    "xwinograd_en": (XWINOGRAD, XWINOGRAD_TOKENS),
    "xwinograd_fr": (XWINOGRAD, XWINOGRAD_TOKENS),
    "multiblimp_fra": (
        {"sen": "Les chats dorment.", "wrong_sen": "Les chats dort."},
        {"sentence_good": "Les chats dorment.", "sentence_bad": "Les chats dort.", "label": 0},
    ),
    "lambada_openai_mt_fr": ({"text": "Elle donna la clé à Tom, et la clé fut à Tom"}, None),
    "french_bench_arc_challenge": (FRENCH_ARC, None),
    "french_bench_hellaswag": (HELLASWAG_FR, HELLASWAG_FR_DONE),
    "french_bench_boolqa": ({"passage": "Le chat dort.", "question": "le chat dort-il", "label": 1}, None),
    "french_bench_grammar": (GRAMMAR | {"answer": "A"}, None),
    "french_bench_vocab": (GRAMMAR | {"answer": "B"}, None),
    "french_bench_reading_comp": (GRAMMAR | {"context": "Le ciel est bleu.", "answer": "C"}, None),
    "french_bench_topic_based_nli": ({"text": "Très bon.", "topic": "goût", "polarity": "positif"}, None),
    "french_bench_xnli": ({"premise": "Il pleut.", "hypothesis": "Il fait beau.", "label": 2}, None),
    "french_bench_fquadv2_bool": (FQUAD_IMPOSSIBLE, None),
    "french_bench_fquadv2": (FQUAD_IMPOSSIBLE, None),
    "french_bench_opus_perplexity": ({"text": "Le pont est vieux, mais il tient."}, None),
    "french_bench_wikitext_fr": ({"paragraph": "Le pont , long de 3 @,@ 5 km , est vieux . \n"}, None),
}


def write_items(folder, tasks, copies=1):
    """Files NAME.jsonl of the hub's form, each with `copies` of its item."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        row = json.dumps(ITEMS[task][0], ensure_ascii=False) + "\n"
        (folder / f"{task}.jsonl").write_text(row * copies, encoding="utf-8")
    return folder
