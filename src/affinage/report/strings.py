"""Every word the page says, in English and French side by side, so that neither can be forgotten."""

import re

from affinage.report.comparison_words import WORDS as COMPARISON

_WORDS: dict[str, tuple[str, str]] = {
    # head
    "contents": ("Contents", "Sommaire"),
    "verdict_model": ("A model of {parameters} parameters", "Un modèle de {parameters} paramètres"),
    "verdict_tuned": ("A given model of {parameters} parameters", "Un modèle existant de {parameters} paramètres"),
    "verdict_data": ("Text made ready for training", "Du texte préparé pour l’entraînement"),
    "verdict_tokens": ("trained on {tokens} tokens", "entraîné sur {tokens} tokens"),
    "verdict_pretrained": ("pretrained on {tokens} tokens", "préentraîné sur {tokens} tokens"),
    "verdict_images": ("shown {images} images", "à qui {images} images ont été montrées"),
    "looks_caption": (
        "Benchmarks while it was trained, ± one standard error; bold: worse than at an earlier step (McNemar’s test)",
        "Bancs d’essai pendant l’apprentissage, ± une erreur type ; en gras : pire qu’à un pas antérieur (McNemar)",
    ),
    "looks_in_loop_caption": (
        "Benchmarks while it was trained, on few items, ± one standard error",
        "Bancs d’essai pendant l’apprentissage, sur peu de questions, ± une erreur type",
    ),
    "looks": ("Benchmarks on the way", "Bancs d’essai en chemin"),
    "looks_worse": (
        "Ringed: worse than at an earlier step, by more than chance (McNemar’s test).",
        "Cerclé : pire qu’à un pas antérieur, au-delà du hasard (test de McNemar).",
    ),
    "worse_lead": (
        "Benchmarks got worse by more than chance: {tasks}.",
        "Des bancs d’essai empirent au-delà du hasard : {tasks}.",
    ),
    "worse_lead_loss": (
        "While the loss fell from {first} to {last}, benchmarks got worse by more than chance: {tasks}.",
        "Pendant que la perte baisse de {first} à {last}, des bancs d’essai empirent au-delà du hasard : {tasks}.",
    ),
    "worse_one": (
        "{task} from {before} at step {than} to {now} at step {step} (p\u00a0=\u00a0{p})",
        "{task} de {before} au pas {than} à {now} au pas {step} (p\u00a0=\u00a0{p})",
    ),
    "looks_axis": ("score ± one standard error", "score ± une erreur type"),
    "bits_per_byte_axis": ("bits per byte of validation text", "bits par octet du texte de validation"),
    "ended": ("The training ended at step {step}: {why}.", "L’apprentissage s’est arrêté au pas {step} : {why}."),
    "verdict_dpo": ("taught preferences", "formé sur des préférences"),
    "verdict_sft": ("fine-tuned on conversations", "affiné sur des conversations"),
    "verdict_time": ("in {time}", "en {time}"),
    "verdict_devices": ("on {devices}", "sur {devices}"),
    "verdict_scores": ("Scores: {scores}.", "Scores : {scores}."),
    "verdict_range": (
        "Scores on {count} tasks range from {low} to {high}.",
        "Ses scores sur {count} épreuves vont de {low} à {high}.",
    ),
    "and": ("and", "et"),
    "colon": (":", " :"),
    "reproduce": ("To reproduce", "Pour reproduire"),
    "finished": ("Last stage started {date} UTC", "Dernière étape commencée le {date} UTC"),
    "parameters": ("Parameters", "Paramètres"),
    "tokens_trained": ("Tokens of pretraining", "Tokens du préentraînement"),
    "images_seen": ("Images seen", "Images vues"),
    "epochs": ("{epochs} epochs of {unique}", "{epochs} époques de {unique}"),
    "whole_run": ("Whole run", "Durée totale"),
    "of_which_training": ("{time} of it training", "dont {time} d’entraînement"),
    "text_kept": ("Text kept", "Texte conservé"),
    "of_raw": ("{share} of {raw}", "{share} de {raw}"),
    "on_validation": ("mean over {count} validation sets", "moyenne de {count} jeux de validation"),
    "on_one_validation": ("on {name}", "sur {name}"),
    "mean_score": ("Mean score", "Score moyen"),
    "over_one_task": ("{model}, on one task", "{model}, sur une épreuve"),
    "over_tasks": ("{model}, over {count} tasks", "{model}, sur {count} épreuves"),
    # data
    "data": ("Data", "Données"),
    "data_lead": (
        "Of {documents_in} documents ({bytes_in}), {documents_out} ({bytes_out}) are left to train on.",
        "Sur {documents_in} documents ({bytes_in}), {documents_out} ({bytes_out}) restent pour l’entraînement.",
    ),
    "funnel_key": (
        "Upper bar: documents. Lower bar: bytes.",
        "Barre du haut : documents. Barre du bas : octets.",
    ),
    "not_held_out": (
        "Too few documents to hold any out for validation: {groups}.",
        "Trop peu de documents pour en mettre de côté pour la validation : {groups}.",
    ),
    "kept": ("kept", "conservé"),
    "removed": ("removed", "retiré"),
    "held_out": ("held out for validation", "mis de côté pour la validation"),
    "stage": ("Stage", "Étape"),
    "why_removed": ("{count} removed: why, with examples", "{count} retirés : pourquoi, avec des exemples"),
    "languages": ("Languages", "Langues"),
    "sources": ("Sources", "Sources"),
    "language": ("Language", "Langue"),
    "source": ("Source", "Source"),
    "bytes": ("Bytes", "Octets"),
    "share": ("Share", "Part"),
    "documents_title": ("Documents", "Documents"),
    "unknown": ("unknown", "inconnue"),
    "world": ("world", "monde"),
    "ingest": ("ingest", "collecte"),
    "filter": ("filter", "filtrage"),
    "dedup": ("dedup", "dédoublonnage"),
    "decontaminate": ("decontaminate", "décontamination"),
    "split": ("split", "découpage"),
    "conversations": ("conversations", "conversations"),
    "thresholds": ("What a threshold of language id costs", "Ce que coûte un seuil d’identification de langue"),
    "thresholds_lead": (
        "Share of the documents, and in small of their bytes, that each threshold keeps; the one used is bold. "
        "Documents in other languages are not counted.",
        "Part des documents et, en petit, de leurs octets que garde chaque seuil ; celui appliqué est en gras. "
        "Les documents dans d’autres langues ne comptent pas.",
    ),
    "contamination": ("Benchmarks looked for in the text", "Épreuves cherchées dans le texte"),
    "contamination_lead": (
        "Looked for: {ngram} words in a row, or shorter items whole. "
        "Left out as common to many items or documents: {boilerplate} runs of words.",
        "Recherché : {ngram} mots de suite, ou un item plus court en entier. "
        "Écartées, car communes à bien des items ou documents : {boilerplate} suites de mots.",
    ),
    "benchmark": ("Benchmark", "Épreuve"),
    "items_found": ("Items found", "Items trouvés"),
    "items_too_short": ("Too short to tell", "Trop courts pour conclure"),
    "first_matches": ("The first matches", "Les premières correspondances"),
    # near duplicates
    "duplicates": ("Near duplicates", "Quasi-doublons"),
    "duplicates_lead": (
        "The pairs least alike among those removed, to judge the threshold by. What differs is marked.",
        "Les paires les moins semblables parmi celles retirées, pour juger du seuil. Les différences sont marquées.",
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
    "measured_held_out": ("Measured on held-out documents.", "Mesuré sur des documents mis de côté."),
    "tokenizer_caption": ("Fertility per language", "Fertilité par langue"),
    "tokenizer_sources": ("Fertility per source", "Fertilité par source"),
    "tokenizers_compared": (
        "Bytes per token, beside published tokenizers",
        "Octets par token, à côté de tokeniseurs publiés",
    ),
    "pieces": ("Pieces", "Pièces"),
    "unchanged": ("Documents unchanged", "Documents inchangés"),
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
    "forward_flops": ("Forward FLOPs", "FLOP avant"),
    "total": ("Total", "Total"),
    "model_lead": ("{count} nodes, {parameters} parameters.", "{count} nœuds, {parameters} paramètres."),
    "model_lead_flops": (
        "FLOPs are of the matrix products in a forward pass of one row of {context} tokens, with causal attention.",
        "Les FLOP sont ceux des produits de matrices, passe avant d’une ligne de {context} tokens, attention causale.",
    ),
    "model_lead_flops_image": (
        "FLOPs are of the matrix products in a forward pass of one image with all its views.",
        "Les FLOP sont ceux des produits de matrices, passe avant d’une image avec toutes ses vues.",
    ),
    "model_lead_nodes": ("{count} nodes.", "{count} nœuds."),
    # training
    "pretrain": ("Pretraining", "Préentraînement"),
    "dpo": ("Preferences", "Préférences"),
    "sft": ("Fine-tuning", "Affinage sur conversations"),
    "training_lead": (
        "{steps} steps over {tokens} tokens in {time}: the loss went from {first} to {last} nats per token.",
        "{steps} pas sur {tokens} tokens en {time} : la perte passe de {first} à {last} nats par token.",
    ),
    "training_lead_images": (
        "{steps} steps over {images} images in {time}: the loss went from {first} to {last} per image.",
        "{steps} pas sur {images} images en {time} : la perte passe de {first} à {last} par image.",
    ),
    "training_lead_pairs": (
        "{steps} steps over {tokens} tokens of pairs in {time}: the loss went from {first} to {last} nats per pair.",
        "{steps} pas sur {tokens} tokens de paires en {time} : la perte passe de {first} à {last} nats par paire.",
    ),
    "loss": ("Loss", "Perte"),
    "loss_axis": ("nats per token", "nats par token"),
    "loss_log_axis": ("nats per token, logarithmic", "nats par token, échelle logarithmique"),
    "pair_loss_axis": ("nats per pair", "nats par paire"),
    "pair_loss_log_axis": ("nats per pair, logarithmic", "nats par paire, échelle logarithmique"),
    "image_loss_axis": ("loss per image", "perte par image"),
    "image_loss_log_axis": ("loss per image, logarithmic", "perte par image, échelle logarithmique"),
    "loss_label": (
        "Loss against steps: training, smoothed and raw, and validation sets",
        "Perte selon les pas : entraînement, lissé et brut, et jeux de validation",
    ),
    "training_loss": ("training", "entraînement"),
    "training_raw": ("training, each logged step", "entraînement, chaque pas noté"),
    "validation_of": ("validation: {name}", "validation : {name}"),
    "step": ("step", "pas"),
    "learning_rate": ("Learning rate", "Taux d’apprentissage"),
    "learning_rate_axis": ("per update", "par mise à jour"),
    "tokens_per_second": ("Throughput", "Débit"),
    "tokens_per_second_axis": ("tokens per second", "tokens par seconde"),
    "images_per_second": ("Throughput", "Débit"),
    "images_per_second_axis": ("images per second", "images par seconde"),
    "expert_load_max": ("Fullest expert", "Expert le plus chargé"),
    "expert_load_max_axis": ("its load over the even share", "sa charge sur la part égale"),
    "dropped_share": ("Choices dropped", "Choix abandonnés"),
    "dropped_share_axis": ("share of the choices of experts", "part des choix d’experts"),
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
    "skipped": (
        "Updates skipped, because the loss or the gradient was not finite: {count}.",
        "Mises à jour sautées, la perte ou le gradient n’étant pas fini : {count}.",
    ),
    "validation_caption": ("Validation at the end", "Validation à la fin"),
    "validation_loss": ("Loss (nats per token)", "Perte (nats par token)"),
    "validation_loss_pairs": ("Loss (nats per pair)", "Perte (nats par paire)"),
    "pairs_right": ("Pairs told right", "Paires bien jugées"),
    "bits_per_byte": ("Bits per byte", "Bits par octet"),
    "time_spent": ("Time: {parts}.", "Temps : {parts}."),
    "time_compile": ("compiling {time}", "compilation {time}"),
    "time_restore": ("restoring {time}", "restauration {time}"),
    "time_compute": ("steps {time}", "pas {time}"),
    "time_data": ("waiting for data {time}", "attente des données {time}"),
    "time_lost": ("lost in kills {time}", "perdu dans des arrêts {time}"),
    "time_paused": ("stopped {time}", "arrêté {time}"),
    "time_idle": ("idle {time}", "inactif {time}"),
    "time_validation": ("validation {time}", "validation {time}"),
    "time_save": ("saving {time}", "sauvegardes {time}"),
    "saves": (
        "Saves: {count}, for each of which the loop stood still for {mean} in the mean, and for {most} at most.",
        "Sauvegardes : {count}, dont chacune arrête la boucle pendant {mean} en moyenne, et {most} au plus.",
    ),
    "conversations_lead": (
        "From {found} conversations, {trained} of {tokens} tokens are trained on: what the assistant says. "
        "{truncated} were cut to {context} tokens, {dropped} left out.",
        "De {found} conversations, {trained} tokens sur {tokens} sont appris : ce que dit l’assistant. "
        "{truncated} ont été coupées à {context} tokens, {dropped} écartées.",
    ),
    "conversations_unrolled": (
        "{unrolled} were unrolled: the chat template writes earlier turns otherwise once more follows, so they are "
        "several examples, each up to an answer that is trained.",
        "{unrolled} ont été déroulées : le modèle de conversation écrit autrement les tours précédents quand d’autres "
        "suivent, elles font donc plusieurs exemples, chacun jusqu’à une réponse apprise.",
    ),
    "conversations_reasoning": (
        "{dropped} have reasoning that the chat template does not write; it is not trained on.",
        "{dropped} comportent un raisonnement que le modèle de conversation n’écrit pas ; il n’est pas appris.",
    ),
    # compression
    "compression": ("Bits per byte", "Bits par octet"),
    "compression_lead": (
        "Bits per byte of text that the model never saw; fewer is better. A compressor learns from that text only.",
        "Bits par octet d’un texte jamais vu ; moins, c’est mieux. Un compresseur n’apprend que de ce texte.",
    ),
    "compression_label": ("Bits per byte by model and compressor", "Bits par octet, modèle et compresseurs"),
    "compression_axis": ("bits per byte of held-out text", "bits par octet de texte mis de côté"),
    # probe
    "probe": ("Linear probe", "Sonde linéaire"),
    "probe_lead": (
        "Accuracy on {held_out} held-out images of a logistic regression on the vectors of node {node}, beside the "
        "same network untrained and the pixels. With few labels: mean of {draws} draws of them and its standard "
        "error; with all labels the standard error is over images.",
        "Exactitude, sur {held_out} images mises de côté, d’une régression logistique sur les vecteurs du nœud "
        "{node}, à côté du même réseau non entraîné et des pixels. Avec peu d’étiquettes : moyenne de {draws} tirages "
        "et son erreur type ; avec toutes, l’erreur type porte sur les images.",
    ),
    "probe_label": ("Accuracy by number of labels", "Exactitude selon le nombre d’étiquettes"),
    "probe_axis": ("accuracy on held-out images", "exactitude sur des images mises de côté"),
    "probe_caption": ("Accuracy ± standard error", "Exactitude ± erreur type"),
    "labels": ("Labels", "Étiquettes"),
    "all_labels": ("all labels", "toutes"),
    "labels_each": ("{count} of each class", "{count} par classe"),
    "features_trained": ("trained", "entraîné"),
    "features_untrained": ("untrained", "non entraîné"),
    "features_pixels": ("pixels", "pixels"),
    # scores
    "scores": ("Scores", "Scores"),
    "scores_lead": (
        "Points are scores, bars one standard error each way; a dashed line is what guessing gets.",
        "Les points sont les scores, les barres une erreur type de chaque côté ; un trait pointillé est le hasard.",
    ),
    "scores_lead_change": (
        "Changes of more than two standard errors of the difference are bold (errors taken as independent).",
        "Les écarts de plus de deux erreurs types de la différence sont en gras (erreurs supposées indépendantes).",
    ),
    "scores_label": ("Scores per task with standard errors", "Scores par épreuve avec erreurs types"),
    "scores_axis": ("score of the task’s headline metric", "score de la mesure principale de l’épreuve"),
    "scores_caption": ("All metrics, value ± standard error", "Toutes les mesures, valeur ± erreur type"),
    "value": ("Value", "Valeur"),
    "by_hand": ("Judged by affinage eval", "Jugé par affinage eval"),
    "by_hand_lead": (
        "Models of this run on tasks of which its recipe says nothing, or otherwise than it says.",
        "Des modèles de cette exécution sur des épreuves dont sa recette ne dit rien, ou autrement qu’elle ne le dit.",
    ),
    "seen": ("Items in the training text", "Questions présentes dans le texte d’entraînement"),
    "seen_lead": (
        "{texts} texts that the {model} was trained on were looked through for runs of {ngram} words of each question. "
        "Questions that stand in them: {count}.",
        "{texts} textes d’entraînement du {model} ont été parcourus à la recherche de suites de {ngram} mots de chaque "
        "question. Questions qui s’y trouvent : {count}.",
    ),
    "seen_found": ("found", "trouvées"),
    "seen_with": ("with all", "avec toutes"),
    "seen_without": ("without them", "sans elles"),
    "seen_numbers": ("numbers", "numéros"),
    "seen_common": ("in more than {texts} texts each: {numbers}", "dans plus de {texts} textes chacune : {numbers}"),
    "published": ("Beside published results", "À côté de résultats publiés"),
    "published_lead": (
        "What others state of their models, taken from where it says below; only this run’s scores were measured here.",
        "Ce que d’autres disent de leurs modèles, d’après les sources ci-dessous ; seuls les scores de cette "
        "exécution ont été mesurés ici.",
    ),
    "published_mark": ("published", "publié"),
    "published_tokens": ("Score against training tokens", "Score selon les tokens d’entraînement"),
    "published_tuned": ("From base to fine-tuned model", "Du modèle de base au modèle affiné"),
    "published_source": ("Published: {source}", "Publié : {source}"),
    "training_tokens": ("training tokens (log)", "tokens d’entraînement (log)"),
    "this_model": ("this model", "ce modèle"),
    "points": ("pts", "pts"),
    "chance": ("chance", "hasard"),
    "task": ("Task", "Épreuve"),
    "metric": ("Metric", "Mesure"),
    "item_count": ("Items", "Questions"),
    "shots": ("Shots", "Exemples"),
    "in_chat": ("in chat", "en dialogue"),
    "in_chat_note": (
        "† asked in the chat template: not comparable with scores asked without it.",
        "† posé dans le modèle de conversation : pas comparable aux scores posés sans lui.",
    ),
    "other_items_note": (
        "Not on the same items as the published scores: {tasks}.",
        "Pas sur les mêmes items que les scores publiés : {tasks}.",
    ),
    "change": ("Change", "Écart"),
    "base": ("base", "base"),
    "dpo_model": ("preferences", "préférences"),
    "sft_model": ("fine-tuned", "affiné"),
    "task_items": ("Some items of each task, with answers", "Quelques items de chaque épreuve, avec réponses"),
    "items_lead": (
        "A check mark stands before the right choice; bold is what the last model chose.",
        "Une coche précède le bon choix ; en gras, celui du dernier modèle.",
    ),
    "expected": ("expected: {text}", "attendu : {text}"),
    "answered": ("answered: {text}", "répondu : {text}"),
    "stopped": (
        "{share} of {count} generated answers ended by themselves.",
        "{share} des {count} réponses générées se terminent d’elles-mêmes.",
    ),
    # samples
    "samples": ("What it writes", "Ce qu’il écrit"),
    "samples_lead": ("As generated, not selected here.", "Tel que généré, sans tri."),
    "samples_base": ("The base model continues", "Le modèle de base continue"),
    "samples_chat": ("The chat model answers", "Le modèle de dialogue répond"),
    "empty_answer": ("(nothing)", "(rien)"),
    # predicted
    "predicted": ("Predicted and measured", "Prévu et mesuré"),
    "predicted_lead": (
        "What the planner says of these settings on these devices, beside what happened. On accelerators its times "
        "are good to a quarter or so, on processors to a third, if nothing else runs there.",
        "Ce que le planificateur dit de ces réglages sur ce matériel, à côté de ce qui s’est passé. Sur accélérateur, "
        "ses durées sont justes à un quart près, sur processeur à un tiers, si rien d’autre n’y tourne.",
    ),
    "predicted_caption": ("Predicted and measured quantities", "Grandeurs prévues et mesurées"),
    "quantity": ("Quantity", "Grandeur"),
    "predicted_title": ("Predicted", "Prévu"),
    "measured_title": ("Measured", "Mesuré"),
    "ratio": ("Ratio", "Rapport"),
    "q_flops": ("FLOPs of all steps", "FLOP de tous les pas"),
    "q_flops_per_second": ("FLOP/s achieved", "FLOP/s atteints"),
    "q_mfu": ("share of the peak (MFU)", "part du maximum (MFU)"),
    "q_parameters": ("parameters", "paramètres"),
    "q_flops_per_step": ("FLOPs per step", "FLOP par pas"),
    "q_seconds": ("time of all steps", "durée de tous les pas"),
    "q_tokens": ("tokens", "tokens"),
    "q_tokens_per_second": ("tokens per second", "tokens par seconde"),
    "q_images_per_second": ("images per second", "images par seconde"),
    "q_steps": ("steps", "pas"),
    "q_step_seconds": ("time of a step", "durée d’un pas"),
    "q_memory": (
        "memory of a device at the peak (of a processor: of the process, all stages)",
        "mémoire d’un appareil au plus haut (processeur : du processus, toutes étapes)",
    ),
    "losses_caption": (
        "Time that was no step, which the prediction leaves out",
        "Temps hors des pas, que la prévision laisse de côté",
    ),
    "part": ("Part", "Part"),
    "share_of_training": ("Share of the training", "Part de l’entraînement"),
    # settings and stages
    "settings": ("Settings", "Réglages"),
    "settings_lead": (
        "The recipe in effect, defaults included.",
        "La recette appliquée, valeurs par défaut comprises.",
    ),
    "show_recipe": ("Show the recipe", "Afficher la recette"),
    "versions": ("Versions", "Versions"),
    "stages": ("Stages", "Étapes"),
    "stages_lead": (
        "A key stands for settings, inputs and code; a seal hashes the SHA-256 of all files that the stage wrote. "
        "What the report itself takes is not counted.",
        "Une clé désigne réglages, entrées et code ; un sceau hache les SHA-256 de tous les fichiers de l’étape. "
        "La durée du rapport lui-même n’est pas comptée.",
    ),
    "stages_caption": ("Stages of the run", "Étapes de l’exécution"),
    "group_data": ("data", "données"),
    "group_training": ("training", "entraînement"),
    "group_evaluation": ("evaluation", "évaluation"),
    "group_release": ("release", "publication"),
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

LANGUAGES = ("en", "fr")


def strings(language: str) -> dict[str, str]:
    """The words of the page in `language`; English for a language the page does not speak."""
    index = LANGUAGES.index(spoken(language))
    return {key: _spaced(words[index]) for key, words in (_WORDS | COMPARISON).items()}


def spoken(language: str) -> str:
    """The language that a page for readers of `language` is in: English where it is none of ours."""
    return language if language in LANGUAGES else LANGUAGES[0]


def _spaced(text: str) -> str:
    """French sets a space before these signs, which must not be where a line ends."""
    return re.sub(r" (?=[:;?!»])", "\u00a0", text)
