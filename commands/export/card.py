"""The model card of an exported network: Markdown with the metadata that hubs expect."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allstep.commands.shared.page.document import plain
from allstep.commands.shared.records.runs import FILE, Epoch, read_events
from allstep.common.checkpoint.state import Progress
from allstep.common.files.strict_json import Mismatch
from allstep.common.training.description import Description
from allstep.common.training.trained import Trained

_TAGS = {"classification": "classification", "regression": "regression", "next-token": "text-generation"}
_MAX_CLASSES, _MAX_EPOCHS = 100, 20
_NOT_SHOWN = ("data-dir", "output-dir", "mirror", "timeline", "resume", "init-from", "curriculum")
"""Flags that are paths of the machine that trained."""


def card(
    trained: Trained,
    progress: Progress,
    form: str,
    name: str,
    *,
    scales: bool,
    samples: str,
    framework: str,
    needs: str | None,
) -> str:
    """Return the card.

    Args:
        progress: how far the weights are trained, which may be those of an earlier checkpoint than the newest.
        form: format of the file.
        name: name of the file.
        scales: whether it takes samples as they are in the data set.
        samples: type and shape of what it takes, in words.
        framework: library that wrote it.
        needs: what a program needs besides the library to load it, in words.
    """
    import yaml

    run, manifest = trained.description, trained.manifest
    assert manifest is not None  # of a checkpoint, since it has a description
    epochs = _epochs(trained.run)
    last = next((epoch for epoch in epochs if epoch.epoch == progress.epoch), None)
    measured = {"accuracy": last.validation_accuracy} if last and last.validation_accuracy is not None else {}
    kind = _kind(run)
    results = [{"type": metric, "value": round(value, 6)} for metric, value in measured.items()]
    data = _short(manifest.config.get("dataset"))
    entry = {"task": {"type": kind}, "dataset": {"name": data, "type": data}, "metrics": results}
    head = {
        "library_name": {"pytorch": "pytorch", "tensorflow": "keras"}[framework],
        "pipeline_tag": kind,
        "tags": ["allstep", run.model.partition(":")[0]],
        "model-index": [{"name": name, "results": [entry] if results else []}],
    }
    flags = {key: value for key, value in manifest.config.items() if value is not None and value != []}
    sections = {
        "Samples": [f"Input: {samples}. {_preparation(run, scales=scales)}".rstrip()],
        "Classes": _classes(run.classes),
        "Metrics": _curve(epochs),
        "Training": [
            f"Data set: {plain(data)}. Loss: {plain(run.loss)}. Step {progress.step}, epoch {progress.epoch}.",
            "",
            *(f"- {plain(key)}: {plain(_short(value))}" for key, value in flags.items() if key not in _NOT_SHOWN),
        ],
        "Versions": [
            f"- {plain(key)}: {plain(value)}" for key, value in {**run.versions, "allstep": run.allstep}.items()
        ],
    }
    title = f"{plain(run.model)} for {kind}, trained with allstep {plain(run.allstep)} and exported as {form}."
    if needs:
        title += f" A program that loads it needs {plain(needs)}."
    lines = ["---", yaml.safe_dump(head, sort_keys=False).rstrip(), "---", "", f"# {plain(name)}", "", title]
    for heading, content in sections.items():
        lines += ["", f"## {heading}", "", *content] if content else []
    return "\n".join(lines) + "\n"


def _kind(run: Description) -> str:
    """Return the task as hubs name it."""
    if run.task == "next-token":
        return _TAGS[run.task]
    if run.input_type == "int64":
        return f"text-{_TAGS[run.task]}"
    return f"{'image' if len(run.input_shape) == 3 else 'tabular'}-{_TAGS[run.task]}"


def _preparation(run: Description, *, scales: bool) -> str:
    """Return in words how samples are made, and what outputs are."""
    words = []
    if scales:
        words.append("The file takes them as they are.")
    elif run.input_type != "int64":
        mean, std = (f"({', '.join(f'{value:.6g}' for value in values)})" for values in (run.mean, run.std))
        words.append(f"Normalise them first: (x / {run.scale:g} - mean) / std, with mean {mean} and std {std}.")
    if files := run.image_files:
        words.append(
            f"Pictures are RGB: the central {files.crop:.4g} of the shorter side, resized to {files.size} x "
            f"{files.size} pixels (bilinear, antialiased)."
        )
    outputs = {"regression": f"{run.num_classes} numbers", "next-token": "logits of each next token"}
    words.append(f"Outputs: {outputs.get(run.task, f'logits of {run.num_classes} classes')}.")
    return " ".join(words)


def _short(value: Any) -> str:
    """Return a value without the folders of the machine that trained."""
    return " ".join(map(_without_folder, value if isinstance(value, list) else [value]))


def _without_folder(word: Any) -> str:
    """Return a word of a flag, with a file's name for its absolute path; the path may follow a prefix as in a:/b."""
    text = str(word)
    if ":/" in text:
        prefix, _, path = text.partition(":")
        return f"{prefix}:{Path(path).name}"
    return Path(text).name if text.startswith("/") else text


def _classes(names: Sequence[str]) -> list[str]:
    more = [f"- and {len(names) - _MAX_CLASSES} more"] if len(names) > _MAX_CLASSES else []
    return [*(f"- {number}: {plain(name)}" for number, name in enumerate(names[:_MAX_CLASSES])), *more]


def _epochs(run: Path) -> Sequence[Epoch]:
    """Return the epochs of a run that is an output directory and has its events."""
    try:
        return read_events(run / FILE).epochs
    except (OSError, Mismatch):
        return ()


def _curve(epochs: Sequence[Epoch]) -> list[str]:
    if not epochs:
        return ["The run's events were not at hand."]
    step = -(-len(epochs) // _MAX_EPOCHS)
    shown = [epoch for index, epoch in enumerate(epochs, 1) if index % step == 0 or index == len(epochs)]
    rows = [
        f"| {epoch.epoch:g} | {epoch.train_loss:.4g} | "
        f"{'–' if epoch.validation_accuracy is None else f'{epoch.validation_accuracy:.4f}'} |"
        for epoch in shown
    ]
    return ["| epoch | training loss | validation accuracy |", "| --- | --- | --- |", *rows]
