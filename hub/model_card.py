"""The card of a checkpoint: metadata for the Hub, text for people, every figure read from the checkpoint's own results.

    python -m hub.model_card runs/mine user/name --license cc-by-4.0

What it was trained and tested on comes from what the run noted down when it read the data, never from what its recipe
asks for. What no file tells is said to be unknown.
"""

import argparse
import json
import re
from argparse import ArgumentTypeError
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hub.hub_errors import hub_error_message
from hub.run_files import (
    CheckedMapping,
    count_parameters,
    is_repository,
    local_paths,
    read_record,
    read_samples,
    sanitize_recipe,
)
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error

TEMPLATE = Path(__file__).with_name("model_card.md")
METRICS = {  # in all_results.json -> (the Hub's name, for people)
    "test_bleu": ("bleu", "BLEU"),
    "test_chrf": ("chrf", "chrF"),
    "test_ter": ("ter", "TER (lower is better)"),
    "test_exact_match": ("exact_match", "exact match, %"),
    "test_wer": ("wer", "WER, % (lower is better)"),
    "test_per": ("per", "PER, % (lower is better)"),
}
PAPERS = "BLEU-4 on normalised, lower-cased, Moses-tokenized text, as papers on Multi30k report it"
MADE_UP = {"demo": "the embedded English-German corpus", "random": "random pairs of numbers"}  # by the program itself
NO_LANGUAGES = ("cmd", "act", "src", "tgt", "trg", "in", "out")  # names of columns that look like one
NUM_SAMPLES_SHOWN = 10  # sample translations, the first ones
UNKNOWN = "not known: no file of the checkpoint tells"


def main() -> None:
    parser = CommandLineParser("hub.model_card", __doc__)
    parser.add_argument("checkpoint", type=Path, help="folder")
    parser.add_argument("repo_id", help="user/name, as it will be on the Hub")
    add_metadata_options(parser)
    arguments = parser.parse_args()
    with exit_on_user_error(parser.prog, formatter=partial(hub_error_message, repo_id=arguments.repo_id)):
        print(make_card(arguments.checkpoint, arguments.repo_id, **metadata(arguments)))


def add_metadata_options(parser: argparse.ArgumentParser) -> None:
    """The card's metadata that only the owner knows."""
    parser.add_argument(
        "--license", type=license_id, help="of the weights, as the Hub writes it, such as cc-by-4.0; default: unknown"
    )
    parser.add_argument(
        "--dataset", action="append", default=[], type=on_the_hub, help="its name on the Hub; may be given again"
    )
    parser.add_argument("--base_model", type=on_the_hub, help="on the Hub, that it was fine-tuned from")


def license_id(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9]*([.+-]+[a-z0-9]+)*\+{0,2}", text):
        raise ArgumentTypeError(
            f"{text!r} is no license of the Hub: give an identifier such as cc-by-4.0, mit or other, from "
            f"https://huggingface.co/docs/hub/repositories-licenses"
        )
    return text


def on_the_hub(text: str) -> str:
    if not is_repository(text):
        raise ArgumentTypeError(f"{text!r} is no name on the Hub: give user/name")
    return text


def metadata(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"license": arguments.license, "datasets": arguments.dataset, "base_model": arguments.base_model}


def make_card(
    folder: Path, repo_id: str, license: str | None = None, datasets: list[str] | None = None,
    base_model: str | None = None,
) -> ModelCard:  # fmt: skip
    """The card of the checkpoint in `folder`.

    Args:
        datasets: what the owner says that it was trained on, where the run has not noted it down.
        base_model: likewise, what it was fine-tuned from.

    Raises:
        ValueError: the folder is no checkpoint, one of its files cannot be read, or the run has noted down that what
            the owner says is not so.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no config.json.")
    names = ("config.json", "all_results.json", "import_report.json", "recipe.yaml")
    config, results, report, recipe = (read_record(folder / name) for name in names)
    if report:  # what else lies there is of another model
        results, recipe = CheckedMapping({}, results.name), CheckedMapping({}, recipe.name)
    data = results.record("data")
    named = datasets_of(data, datasets or [])
    base = base_of(recipe, base_model)
    name = repo_id.rpartition("/")[2]
    metadata = ModelCardData(
        language=[each.lower() for each in languages(recipe, data) if is_language(each)] or None,
        license=license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_transformer", "encoder-decoder", "attention-is-all-you-need"],
        datasets=named or None,
        base_model=base if base and is_repository(base) else None,
        model_name=name,
        eval_results=evaluations(results, data) or None,
    )
    samples = read_samples(folder / "samples.tsv") if results else []
    return ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        title=name,
        repo_id=repo_id,
        summary=summary(recipe, report, data, base),
        example=json.dumps(samples[0][0] if samples else "A sentence.", ensure_ascii=False),
        architecture=architecture(config, count_parameters(folder)),
        data=about_data(results, data, datasets or []),
        training=about_training(results, report),
        scores=table_of_scores(results, recipe, data),
        samples=table_of_samples(samples),
        limits=limits(recipe, results, data, base),
        recipe=sanitize_recipe(recipe, results, local_paths(folder))[0].rstrip(),
    )


def is_language(name: str) -> bool:
    """Whether a recipe's language is one for the Hub: two or three letters, "en", not "phon" or "cmd.act"."""
    return name.isascii() and name.isalpha() and len(name) in (2, 3) and name.lower() not in NO_LANGUAGES


def languages(recipe: CheckedMapping, data: CheckedMapping) -> list[str]:
    """Source and target as the recipe calls them; what the program makes up has its own."""
    source = data.record("train").text("source")
    if source in MADE_UP:
        return ["en", "de"] if source == "demo" else []
    found = [recipe.text("source_lang"), recipe.text("target_lang")]
    return [each for each in found if each] if all(found) else []


def datasets_of(data: CheckedMapping, said: list[str]) -> list[str]:
    """The data sets of the Hub that were read, or those that the owner names where that was not noted down.

    Raises:
        ValueError: the run has read something else than the owner says.
    """
    parts = [data.record(split) for split in ("train", "validation")]
    read = list(dict.fromkeys(part.text("dataset") or "unknown" for part in parts if part.text("source") == "hub"))
    known = parts[0].text("source") in ("hub", *MADE_UP)
    if known and (wrong := [name for name in said if name not in read]):
        what = ", ".join(read) or MADE_UP[str(parts[0].text("source"))]
        raise ValueError(f"--dataset {wrong[0]}: the run has read {what}, as all_results.json says. Leave it out.")
    return read or said


def base_of(recipe: CheckedMapping, said: str | None) -> str | None:
    """What the model was fine-tuned from: a name on the Hub or a folder.

    Raises:
        ValueError: the recipe says something else than the owner.
    """
    base = recipe.text("base_model")
    if said and recipe and said != base and (base is None or is_repository(base)):
        what = f"was fine-tuned from {base}" if base else "began with fresh weights"
        raise ValueError(f"--base_model {said}: the run {what}, as recipe.yaml says. Leave it out.")
    return said or base


def name_of(part: CheckedMapping) -> str:
    """What a split was read from."""
    source = part.text("source")
    if source in MADE_UP:
        return MADE_UP[source]
    if source == "hub":
        config = part.text("config")
        return f"{part.text('dataset')}{f' ({config})' if config else ''}, {part.text('split')}"
    if source == "local_dataset":
        return f"a local data set of the owner, {part.text('split')}"
    if source == "files":
        return f"text files of the owner ({', '.join(part.texts('files'))})"
    return "unknown"


def evaluations(results: CheckedMapping, data: CheckedMapping) -> list[EvalResult]:
    """One entry of the model index for each score."""
    test = data.record("test")
    is_public = test.text("source") == "hub"
    found = []
    for key, (metric, label) in METRICS.items():
        if key in results:
            signature = results.text(f"{key}_signature")
            found.append(
                EvalResult(
                    task_type="translation",
                    dataset_type=test.text("dataset") or "unknown" if is_public else "unknown",
                    dataset_name=(test.text("dataset") or "unknown") if is_public else name_of(test),
                    dataset_config=test.text("config") if is_public else None,
                    dataset_split=(test.text("split") if is_public else None) or "test",
                    metric_type=metric,
                    metric_name=f"{label} ({signature})" if signature else label,
                    metric_value=round(results.number(key), 2),
                )
            )
    return found


def summary(recipe: CheckedMapping, report: CheckedMapping, data: CheckedMapping, base: str | None) -> str:
    what = "The encoder-decoder of [Attention Is All You Need](https://arxiv.org/abs/1706.03762)"
    link = f"[{base}](https://huggingface.co/{base})" if base and is_repository(base) else None
    if report:
        layout = report.text("layout")
        from_where = f"of the layout `{layout}`" if layout else f"whose layout is {UNKNOWN}"
        said = f" By its owner's word it was fine-tuned from {link}." if link else ""
        return f"{what}, imported from a checkpoint {from_where}.{said}"
    if data.record("train").text("source") == "random" and not base:
        return f"{what}, trained from scratch on random pairs of numbers, which it can only learn by heart."
    pair = languages(recipe, data)
    if not pair:
        said = f" By its owner's word it was fine-tuned from {link}." if link and not recipe else ""
        return f"{what}. What it was trained for is {UNKNOWN}.{said}"
    rank = recipe.count("lora_rank")
    how = f"fine-tuned by low-rank updates of rank {rank} (LoRA)" if rank else "fine-tuned"
    start = f"{how} from {link or 'a checkpoint that is not on the Hub'}" if base else "trained from scratch"
    return f"{what}, {start}: from {pair[0]} to {pair[1]}."


def architecture(config: CheckedMapping, parameters: int | None) -> list[str]:
    def both(key: str) -> str:
        encoder, decoder = config.count(f"encoder_{key}"), config.count(f"decoder_{key}")
        return known(encoder) if encoder == decoder else f"{known(encoder)} (encoder) and {known(decoder)} (decoder)"

    def known(value: int | None) -> str:
        return "unknown" if value is None else f"{value:,}"

    shared = config.values.get("share_encoder_decoder_embeddings", True) is True
    source, target = known(config.count("vocab_size")), known(config.count("decoder_vocab_size"))
    return [
        f"{known(config.count('encoder_layers'))} encoder and {known(config.count('decoder_layers'))} decoder layers, "
        f"width {known(config.count('d_model'))}, heads: {both('attention_heads')}, feed-forward width: "
        f"{both('ffn_dim')}",
        f"{config.text('norm_position') or 'unknown'}-norm, {config.text('position_embedding_type') or 'unknown'} "
        f"positions",
        f"embeddings: {source} tokens, shared by both sides"
        if shared
        else f"embeddings: {source} source and {target} target tokens",
        f"parameters: {UNKNOWN if parameters is None else f'{parameters:,}'}",
    ]


def about_data(results: CheckedMapping, data: CheckedMapping, said: list[str]) -> list[str]:
    owner = [f"by its owner's word trained on: {', '.join(said)}"] if said else []
    train = data.record("train")
    lines = [] if train else [f"Training data: {UNKNOWN}."]
    for split, label in (("train", "training"), ("validation", "validation"), ("test", "test")):
        if not (part := data.record(split)):
            continue
        line = f"{label}: {'set aside from the training data' if 'split_off' in part else name_of(part)}"
        if (pairs := part.count("pairs")) is not None:
            twice = part.values.get("both_directions") is True
            line += f"; {pairs // 2:,} pairs, each in both directions" if twice else f"; {pairs:,} pairs"
        if references := part.text("references"):
            line += f"; further accepted translations in {references}"
        if sha256 := part.text("sha256"):
            line += f"; SHA-256 of the text: `{sha256}`"
        lines.append(line)
    trained, read = results.count("train_pairs"), results.count("train_pairs_read")
    lines += [f"trained on {trained:,} pairs"] if trained is not None else []
    lines += [f"read while training, {read:,} pairs"] if read is not None else []
    if not train and (sha256 := results.text("train_sha256")):
        lines.append(f"SHA-256 of the training text: `{sha256}`")
    dropped = results.values.get("train_pairs_dropped")
    if isinstance(dropped, dict):
        counts = results.record("train_pairs_dropped")
        if counts:
            lines.append(f"left out: {', '.join(f'{reason}: {counts.count(reason) or 0:,}' for reason in dropped)}")
    elif dropped:
        lines.append(f"left out: {results.count('train_pairs_dropped'):,} pairs")
    return lines if train.text("source") in ("hub", *MADE_UP) else lines + owner


def about_training(results: CheckedMapping, report: CheckedMapping) -> list[str]:
    if report:
        difference = report.record("parity").number("largest_difference_of_log_probabilities")
        lines = [f"Trained elsewhere; cost: {UNKNOWN}."]
        if difference is not None:
            lines.append(
                f"Compared with the owner's own code on random batches: log-probabilities within {difference:.1g}."
            )
        return lines
    if not results:
        return [f"Cost: {UNKNOWN}."]
    needed = (
        *("updates", "train_target_tokens", "train_runtime"),
        *("device", "processes", "threads", "cpu_cores", "precision"),
    )
    if missing := [name for name in needed if name not in results]:
        return [f"Cost: {UNKNOWN} ({missing[0]} is missing in its results)."]
    versions = results.record("versions")
    count = results.count
    return [
        f"{count('updates'):,} updates, {count('train_target_tokens'):,} target tokens",
        f"{results.number('train_runtime') / 60:.1f} minutes on {results.text('device')}; processes: "
        f"{count('processes')}, with {count('threads')} threads each (CPU cores: {count('cpu_cores')}); "
        f"{results.text('precision')}",
        f"energy: {UNKNOWN}",
        "versions: " + (", ".join(f"{name} {versions.text(name)}" for name in versions.values) or UNKNOWN),
    ]


def table_of_scores(results: CheckedMapping, recipe: CheckedMapping, data: CheckedMapping) -> str:
    rows = []
    for key, (_, label) in METRICS.items():
        if key in results:
            signature = results.text(f"{key}_signature")
            rows.append(f"| {label} | {results.number(key):.2f} | {f'`{signature}`' if signature else ''} |")
    if "test_bleu_tokenized_lc" in results:
        rows.append(f"| BLEU, papers' protocol | {results.number('test_bleu_tokenized_lc'):.2f} | {PAPERS} |")
    if not rows:
        return f"Scores: {UNKNOWN}."
    test, beams = data.record("test"), recipe.count("num_beams")
    where = name_of(test) if test else f"a test set that is {UNKNOWN}"
    head = f"On {where}; beam size: {UNKNOWN if beams is None else beams}; one run.\n\n"
    return head + "\n".join(["| score | value | protocol |", "|---|---|---|", *rows])


def table_of_samples(samples: list[list[str]]) -> str:
    if not samples:
        return "None were kept."
    rows = ["| " + " | ".join(map(plain, row)) + " |" for row in samples[:NUM_SAMPLES_SHOWN]]
    head = f"The first {min(NUM_SAMPLES_SHOWN, len(samples))} of the test set, not picked:\n\n"
    return head + "\n".join(["| source | reference | output |", "|---|---|---|", *rows])


def plain(text: str) -> str:
    """A sentence that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", " ".join(text.split()))


def limits(recipe: CheckedMapping, results: CheckedMapping, data: CheckedMapping, base: str | None) -> list[str]:
    lines = [
        "It knows what its training data show: other domains, other kinds of text and other scripts come out wrong."
    ]
    if data.record("train").text("source") == "demo" and not base:
        lines.append("Its corpus comes out of a small grammar: it translates sentences of that grammar and no others.")
    if results and (longest := recipe.count("max_length")):
        lines.append(f"{'Fine-tuned' if base else 'Trained'} on sentences of at most {longest} tokens.")
    if "test_bleu" in results or "test_exact_match" in results:
        lines.append("Scores are of one run on one test set; another seed gives somewhat different ones.")
    lines.append("It has not been examined for biases of its training data.")
    return lines


if __name__ == "__main__":
    main()
