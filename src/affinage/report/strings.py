"""Every word the page says, in English and French side by side, so that neither can be forgotten."""

_NB = "\u00a0"  # no-break space, before French colons and inside guillemets

_WORDS: dict[str, tuple[str, str]] = {
    # head
    "contents": ("Contents", "Sommaire"),
    "report_of": ("Report of the run {name}", "Rapport de l’entraînement {name}"),
    "verdict_model": ("A model of {parameters} parameters", "Un modèle de {parameters} paramètres"),
    "verdict_data": (
        "The data of a run, prepared but not yet trained on",
        "Les données d’un entraînement, préparées mais pas encore apprises",
    ),
    "verdict_tokens": ("trained on {tokens} tokens", "entraîné sur {tokens} tokens"),
    "verdict_sft": ("fine-tuned on conversations", "affiné sur des conversations"),
    "verdict_time": ("in {time}", "en {time}"),
    "verdict_devices": ("on {devices}", "sur {devices}"),
    "verdict_scores": ("It scores {scores}.", "Ses scores" + _NB + ": {scores}."),
    "and": ("and", "et"),
    "reproduce": ("To reproduce", "Pour reproduire"),
    "finished": ("Last stage started {date} UTC", "Dernière étape commencée le {date} UTC"),
    "parameters": ("Parameters", "Paramètres"),
    "tokens_trained": ("Tokens trained on", "Tokens d’entraînement"),
    "epochs": ("{epochs} epochs of {unique}", "{epochs} époques de {unique}"),
    "whole_run": ("Whole run", "Durée totale"),
    "of_which_training": ("{time} of it training", "dont {time} d’entraînement"),
    "text_kept": ("Text kept", "Texte conservé"),
    "of_raw": ("{share} of {raw}", "{share} de {raw}"),
    "validation_bpb": ("Bits per byte", "Bits par octet"),
    "on_validation": ("mean over {count} validation sets", "moyenne de {count} jeux de validation"),
    "on_one_validation": ("on {name}", "sur {name}"),
    "best_change": ("Mean score", "Score moyen"),
    "over_tasks": ("{model}, over {count} tasks", "{model}, sur {count} épreuves"),
    # data
    "data": ("Data", "Données"),
    "data_lead": (
        "Of {documents_in} documents ({bytes_in}), {documents_out} ({bytes_out}) were left after cleaning.",
        "Sur {documents_in} documents ({bytes_in}), {documents_out} ({bytes_out}) restent après nettoyage.",
    ),
    "funnel_key": (
        "Upper bar: documents. Lower bar: bytes.",
        "Barre du haut" + _NB + ": documents. Barre du bas" + _NB + ": octets.",
    ),
    "kept": ("kept", "conservé"),
    "removed": ("removed", "retiré"),
    "documents": ("documents", "documents"),
    "stage": ("Stage", "Étape"),
    "why_removed": ("{count} removed: why, with examples", "{count} retirés" + _NB + ": pourquoi, avec des exemples"),
    "reason": ("Reason", "Motif"),
    "no_examples": ("No examples were kept.", "Aucun exemple conservé."),
    "languages": ("Languages", "Langues"),
    "sources": ("Sources", "Sources"),
    "language": ("Language", "Langue"),
    "source": ("Source", "Source"),
    "bytes": ("Bytes", "Octets"),
    "share": ("Share", "Part"),
    "documents_title": ("Documents", "Documents"),
    "unknown": ("unknown", "inconnue"),
    "world": ("world", "monde"),
    "collect": ("collect", "collecte"),
    "clean": ("clean", "nettoyage"),
    "deduplicate": ("deduplicate", "dédoublonnage"),
    "decontaminate": ("decontaminate", "décontamination"),
    "split": ("split", "découpage"),
    "conversations": ("conversations", "conversations"),
    # near duplicates
    "duplicates": ("Near duplicates", "Quasi-doublons"),
    "duplicates_lead": (
        "Pairs that were found alike, to judge the threshold by. What differs is marked.",
        "Des paires jugées semblables, pour juger du seuil. Les différences sont marquées.",
    ),
    "kept_document": ("Kept", "Conservé"),
    "removed_document": ("Removed", "Retiré"),
    "similarity": ("similarity {value}", "similarité {value}"),
    "identical_excerpt": ("the excerpts are the same", "les extraits sont identiques"),
    # tokenizer
    "tokenizer": ("Tokenizer", "Tokeniseur"),
    "tokenizer_lead": ("A vocabulary of {vocabulary} pieces.", "Un vocabulaire de {vocabulary} pièces."),
    "round_trip": (
        "{exact} of {documents} documents come back from tokens unchanged.",
        "{exact} documents sur {documents} reviennent inchangés des tokens.",
    ),
    "tokenizer_caption": ("Fertility per language", "Fertilité par langue"),
    "tokens_per_word": ("Tokens per word", "Tokens par mot"),
    "bytes_per_token": ("Bytes per token", "Octets par token"),
    "tokens": ("Tokens", "Tokens"),
    "words": ("Words", "Mots"),
    # rows
    "rows": ("Rows", "Lignes"),
    "rows_lead": ("Packed into rows of {context} tokens.", "Rangé en lignes de {context} tokens."),
    "rows_epochs": (
        "Pretraining read {tokens} tokens, {epochs} times the training set.",
        "Le préentraînement a lu {tokens} tokens, soit {epochs} fois le jeu d’entraînement.",
    ),
    "rows_caption": ("Rows of tokens on disk", "Lignes de tokens sur disque"),
    "set": ("Set", "Jeu"),
    "train_set": ("training", "entraînement"),
    "rows_title": ("Rows", "Lignes"),
    # model
    "model": ("Model", "Modèle"),
    "model_caption": ("Nodes of the graph", "Nœuds du graphe"),
    "node": ("Node", "Nœud"),
    "kind": ("Kind", "Genre"),
    "reads": ("Reads", "Entrées"),
    "shape": ("Output shape", "Forme de sortie"),
    "forward_flops": ("Forward FLOPs", "FLOP vers l’avant"),
    "total": ("Total", "Total"),
    "model_lead": ("{count} nodes, {parameters} parameters.", "{count} nœuds, {parameters} paramètres."),
    "model_lead_nodes": ("{count} nodes.", "{count} nœuds."),
    # training
    "pretrain": ("Pretraining", "Préentraînement"),
    "sft": ("Fine-tuning", "Affinage sur conversations"),
    "training_lead": (
        "{steps} steps over {tokens} tokens in {time}: the loss went from {first} to {last} nats per token.",
        "{steps} pas sur {tokens} tokens en {time}" + _NB + ": la perte passe de {first} à {last} nats par token.",
    ),
    "loss": ("Loss", "Perte"),
    "loss_axis": ("nats per token", "nats par token"),
    "loss_label": (
        "Loss against steps: training, smoothed and raw, and validation sets",
        "Perte selon les pas" + _NB + ": entraînement, lissé et brut, et jeux de validation",
    ),
    "training_loss": ("training", "entraînement"),
    "training_raw": ("training, each logged step", "entraînement, chaque pas noté"),
    "validation_of": ("validation: {name}", "validation" + _NB + ": {name}"),
    "step": ("step", "pas"),
    "learning_rate": ("Learning rate", "Taux d’apprentissage"),
    "learning_rate_axis": ("per step", "par pas"),
    "tokens_per_second": ("Throughput", "Débit"),
    "tokens_per_second_axis": ("tokens per second", "tokens par seconde"),
    "grad_norm": ("Gradient norm", "Norme du gradient"),
    "grad_norm_axis": ("global L2 norm before clipping", "norme L2 globale avant écrêtage"),
    "mfu": ("Model FLOPs utilisation", "Utilisation des FLOP (MFU)"),
    "mfu_axis": ("share of the peak", "part du maximum"),
    "smoothed": ("smoothed", "lissé"),
    "raw": ("each logged step", "chaque pas noté"),
    "resumed": (
        "Resumed at step {steps}, marked by dashed lines.",
        "Repris au pas {steps}, marqué par des pointillés.",
    ),
    "broken": (
        "The loss was not a finite number at step {steps}.",
        "La perte n’était pas un nombre fini au pas {steps}.",
    ),
    "validation_caption": ("Validation at the end", "Validation à la fin"),
    "validation_loss": ("Loss (nats per token)", "Perte (nats par token)"),
    "bits_per_byte": ("Bits per byte", "Bits par octet"),
    "time_spent": ("Time: {parts}.", "Temps" + _NB + ": {parts}."),
    "time_compile": ("compiling {time}", "compilation {time}"),
    "time_restore": ("restoring {time}", "restauration {time}"),
    "time_train": ("steps {time}", "pas {time}"),
    "time_validation": ("validation {time}", "validation {time}"),
    "time_save": ("saving {time}", "sauvegardes {time}"),
    "conversations_lead": (
        "{documents_out} of {documents_in} conversations were used.",
        "{documents_out} conversations sur {documents_in} ont servi.",
    ),
    # compression
    "compression": ("Bits per byte", "Bits par octet"),
    "compression_lead": (
        "How many bits the model needs for a byte of text it never saw. A general compressor has no other text to learn from; fewer is better.",
        "Combien de bits il faut au modèle pour un octet de texte jamais vu. Un compresseur n’a pas d’autre texte pour apprendre"
        + _NB
        + "; moins, c’est mieux.",
    ),
    "compression_label": ("Bits per byte by model and compressor", "Bits par octet, modèle et compresseurs"),
    "compression_axis": ("bits per byte of held-out text", "bits par octet de texte mis de côté"),
    # scores
    "scores": ("Scores", "Scores"),
    "scores_lead": (
        "Points are scores, bars one standard error each way; a dashed line is what guessing gets.",
        "Les points sont les scores, les barres une erreur type de chaque côté"
        + _NB
        + "; un trait pointillé est le hasard.",
    ),
    "scores_lead_change": (
        "A change is shown bold where it exceeds two standard errors of the difference, taking the two models’ errors as independent.",
        "Un écart est en gras s’il dépasse deux erreurs types de la différence, les erreurs des deux modèles étant prises pour indépendantes.",
    ),
    "scores_label": ("Scores per task with standard errors", "Scores par épreuve avec erreurs types"),
    "scores_axis": ("score of the task’s headline metric", "score de la mesure principale de l’épreuve"),
    "scores_caption": ("All metrics, value ± standard error", "Toutes les mesures, valeur ± erreur type"),
    "chance": ("chance", "hasard"),
    "task": ("Task", "Épreuve"),
    "metric": ("Metric", "Mesure"),
    "items": ("Items", "Items"),
    "shots": ("Shots", "Exemples"),
    "change": ("Change", "Écart"),
    "base": ("base", "base"),
    "sft_model": ("fine-tuned", "affiné"),
    # samples
    "samples": ("What it writes", "Ce qu’il écrit"),
    "samples_lead": ("As generated, not selected here.", "Tel que généré, sans tri."),
    "samples_base": ("The base model continues", "Le modèle de base continue"),
    "samples_chat": ("The chat model answers", "Le modèle de dialogue répond"),
    "empty_answer": ("(nothing)", "(rien)"),
    # predicted
    "predicted": ("Predicted and measured", "Prévu et mesuré"),
    "predicted_lead": (
        "What was said before the run, beside what happened.",
        "Ce qui était annoncé avant, à côté de ce qui s’est passé.",
    ),
    "predicted_caption": ("Predicted and measured quantities", "Grandeurs prévues et mesurées"),
    "quantity": ("Quantity", "Grandeur"),
    "predicted_title": ("Predicted", "Prévu"),
    "measured_title": ("Measured", "Mesuré"),
    "ratio": ("Measured / predicted", "Mesuré / prévu"),
    "q_parameters": ("parameters", "paramètres"),
    "q_flops_per_step": ("FLOPs per step", "FLOP par pas"),
    "q_seconds": ("training time", "durée d’entraînement"),
    "q_tokens": ("tokens", "tokens"),
    "q_tokens_per_second": ("tokens per second", "tokens par seconde"),
    "q_steps": ("steps", "pas"),
    "achieved": ("Achieved: {flops} in training steps.", "Atteint" + _NB + ": {flops} pendant les pas."),
    # settings and stages
    "settings": ("Settings", "Réglages"),
    "settings_lead": (
        "The recipe in effect, defaults included.",
        "La recette appliquée, valeurs par défaut comprises.",
    ),
    "show_recipe": ("Show the recipe", "Afficher la recette"),
    "versions": ("Versions", "Versions"),
    "package": ("Package", "Paquet"),
    "version": ("Version", "Version"),
    "stages": ("Stages", "Étapes"),
    "stages_lead": (
        "Keys address results by their settings, inputs and code; the seal hashes the SHA-256 of every file of the stage.",
        "Les clés désignent les résultats par réglages, entrées et code"
        + _NB
        + "; le sceau est le hachage des SHA-256 de tous les fichiers de l’étape.",
    ),
    "stages_caption": ("Stages of the run", "Étapes de l’entraînement"),
    "where_time": ("Where the time went", "Où est passé le temps"),
    "time": ("Time", "Durée"),
    "key": ("Key", "Clé"),
    "files": ("Files", "Fichiers"),
    "size": ("Size", "Taille"),
    "seal": ("Seal", "Sceau"),
    "footer": (
        "Written by affinage. This page is one file: it loads nothing from the network.",
        "Écrit par affinage. Cette page tient en un fichier et ne charge rien du réseau.",
    ),
}

_REASONS: dict[str, tuple[str, str]] = {
    "too_short": ("too short", "trop court"),
    "too_long": ("too long", "trop long"),
    "alphanumeric": ("too few letters and digits", "trop peu de lettres et de chiffres"),
    "language": ("other language", "autre langue"),
    "exact_duplicate": ("exact duplicate", "doublon exact"),
    "near_duplicate": ("near duplicate", "quasi-doublon"),
    "empty": ("empty", "vide"),
    "binary": ("binary", "binaire"),
    "control_characters": ("control characters", "caractères de contrôle"),
}

LANGUAGES = ("en", "fr")


def strings(language: str) -> dict[str, str]:
    """The words of the page in `language`; English for a language the page does not speak."""
    index = LANGUAGES.index(language) if language in LANGUAGES else 0
    return {key: words[index] for key, words in _WORDS.items()}


def reason_name(reason: str, language: str) -> str:
    """A reason for removal in words; one the table does not know is shown as the stage called it."""
    known = _REASONS.get(reason)
    if known:
        return known[LANGUAGES.index(language) if language in LANGUAGES else 0]
    return reason.replace("_", " ")
