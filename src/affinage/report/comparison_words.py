"""The words of the page that compares runs, in English and French side by side."""

WORDS: dict[str, tuple[str, str]] = {
    "compared": ("Compared", "Comparaison"),
    "compared_lead": (
        "{count} runs beside each other; {first} is what the others are compared with.",
        "{count} exécutions côte à côte ; les autres sont comparées à {first}.",
    ),
    "runs": ("At a glance", "En bref"),
    "runs_caption": ("What it took and what it gave", "Ce qu’il a fallu et ce que cela donne"),
    "differing": ("Settings that differ", "Réglages qui diffèrent"),
    "differing_lead": (
        "All other settings of the recipes, defaults included, are the same.",
        "Tous les autres réglages des recettes, valeurs par défaut comprises, sont les mêmes.",
    ),
    "same_settings": (
        "The recipes set everything alike, except for names.",
        "Les recettes règlent tout de la même façon, sauf les noms.",
    ),
    "setting": ("Setting", "Réglage"),
    "losses": ("Losses", "Pertes"),
    "losses_lead": (
        "Lines: the smoothed training loss. Points: the mean over the validation sets.",
        "Lignes : la perte d’entraînement lissée. Points : la moyenne des jeux de validation.",
    ),
    "losses_pretrain": ("Loss in pretraining", "Perte au préentraînement"),
    "losses_sft": ("Loss in fine-tuning", "Perte à l’affinage"),
    "losses_dpo": ("Loss in learning preferences", "Perte à l’apprentissage des préférences"),
    "tokens_axis": ("tokens trained on", "tokens d’entraînement"),
    "judged": ("Scores side by side", "Scores côte à côte"),
    "judged_lead": (
        "Points are scores, bars one standard error each way; a dashed line is what guessing gets.",
        "Les points sont les scores, les barres une erreur type de chaque côté ; un trait pointillé est le hasard.",
    ),
    "judged_before": (
        "{name} has changed since it gave these answers, or they do not say of which state of it they are. "
        "To judge it as it is now: {command}",
        "{name} a changé depuis ces réponses, ou elles ne disent pas de quel état du modèle elles sont. "
        "Pour l’évaluer tel qu’il est : {command}",
    ),
    "differences": ("Item by item", "Question par question"),
    "differences_lead": (
        "Differences from {first} over the items that both have answered, with the 95 % interval of paired "
        "differences. Bold: the interval does not hold zero. Of 20 differences that are not there, one looks real.",
        "Écarts avec {first} sur les questions auxquelles les deux ont répondu, avec l’intervalle à 95 % des "
        "différences appariées. En gras : l’intervalle ne contient pas zéro. Sur 20 écarts nuls, un paraît réel.",
    ),
    "asked_otherwise": (
        "Not asked alike, so that what differs is not the models alone: {tasks}.",
        "Pas interrogés de la même façon, si bien que l’écart ne vient pas des seuls modèles : {tasks}.",
    ),
    "other_prompts": (
        "items with another prompt or right answer: {count}",
        "questions dont l’énoncé ou la bonne réponse diffère : {count}",
    ),
    "other_version": ("versions {a} and {b}", "versions {a} et {b}"),
    "log_likelihood": (
        "log_likelihood: of the text asked for, in nats per item, higher is better; "
        "perplexity is exp(−log_likelihood).",
        "log_likelihood : du texte demandé, en nats par question, plus haut est mieux ; la perplexité est "
        "exp(−log_likelihood).",
    ),
    "bits_per_byte_of_texts": (
        "bits_per_byte: of the texts, lower is better.",
        "bits_per_byte : des textes, plus bas est mieux.",
    ),
    "interval": ("95 % interval", "Intervalle à 95 %"),
    "difference": ("Difference", "Écart"),
    "between": ("{low} to {high}", "de {low} à {high}"),
    "c_parameters": ("Parameters", "Paramètres"),
    "c_tokens": ("Tokens, all trainings", "Tokens, tous les entraînements"),
    "c_images": ("Images seen", "Images vues"),
    "c_flops": ("Computation, all trainings", "Calcul, tous les entraînements"),
    "c_devices": ("Devices", "Matériel"),
    "c_training_seconds": ("Time, all trainings", "Durée, tous les entraînements"),
    "c_device_hours": ("Device hours", "Heures d’appareil"),
    "c_seconds": ("Time of the whole run", "Durée totale"),
    "c_tokens_per_second": ("Tokens per second, first training", "Tokens par seconde, premier entraînement"),
    "c_mfu": ("Share of the peak (MFU), first training", "Part du maximum (MFU), premier entraînement"),
    "c_final_loss": ("Loss at the end of the first training", "Perte à la fin du premier entraînement"),
    "c_bits_per_byte": ("Bits per byte, {name}", "Bits par octet, {name}"),
}
