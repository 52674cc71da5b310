"""README.md of an export: a model card as the Hugging Face hub shows them."""

import json
from pathlib import Path
from typing import Any

from flax import traverse_util

from disco_jax.convert.runs import is_run, workdir_of
from disco_jax.convert.weights import Weights
from disco_jax.training.config import default_config
from disco_jax.training.metrics import read_history
from disco_jax.training.setup import CONFIG_FILE

HEADER = "---\npipeline_tag: zero-shot-image-classification\ntags:\n- clip\n- disco-jax\n---\n"


def model_card(weights: Weights, name: str, usage: str, command: str) -> str:
    """The card of exported weights: sizes, use, and, of one of our runs, its config, data, steps and results.

    Args:
        weights: what is exported.
        name: the heading.
        usage: Python lines that load the export.
        command: the command that made it.
    """
    model, source = weights.model, Path(weights.source)
    rows = [
        f"| {tower} | {sizes.width} | {sizes.layers} | {sizes.heads} | {sizes.mlp_width} | {takes} |"
        for tower, sizes, takes in (
            ("image", model.vision, f"{model.vision.image_size} px in patches of {model.vision.patch_size}"),
            ("text", model.text, f"{model.text.context_length} tokens of {model.text.vocab_size:,}"),
        )
    ]
    activation = {"gelu": "GELU", "quickgelu": "QuickGELU"}[model.activation]
    kind = "running averages of the parameters" if weights.ema else "parameters"
    origin = f"The {kind} of a run of disco-jax" if is_run(source) else f"The weights of {weights.source}"
    step = f", after {weights.step:,} steps" if weights.step is not None else ""
    parts = [
        f"{HEADER}\n# {name}",
        f"A CLIP with {activation} and {model.embed_dim} dimensions in common. {origin}{step}.",
        "\n".join(["| tower | width | layers | heads | MLP | takes |", "|---|---|---|---|---|---|", *rows]),
        f"## Use\n\n```python\n{usage}\n```",
        f"Made with\n\n```\n{command}\n```",
    ]
    if is_run(source):
        parts += _of_run(workdir_of(source), weights.step)
    return "\n\n".join(parts) + "\n"


def _of_run(workdir: Path, step: int | None) -> list[str]:
    config = json.loads((workdir / CONFIG_FILE).read_text(encoding="utf-8"))
    data, default = config["data"], json.loads(default_config().to_json())
    split = f" of {data['tfds_name']}" if data["source"] == "tfds" else ""
    training = (
        f"## Training\n\nData: {data['source']}, `{data['train']}`{split}; "
        f"batches of {config['batch_size']:,} for {step:,} of {config['total_steps']:,} steps."
    )
    changed = [
        f"{key} = {value!r}"
        for key, value in traverse_util.flatten_dict(config, sep=".").items()
        if value != traverse_util.flatten_dict(default, sep=".").get(key)
    ]
    settings = "Settings that are not the defaults:\n\n```\n" + "\n".join(changed) + "\n```"
    results: dict[str, dict[str, Any]] = {}
    for row in read_history(workdir):
        if row["step"] == step:  # what a step measured of itself has no group
            results.setdefault("in training", {}).update({k: v for k, v in row.items() if "/" in k})
    for file in sorted((workdir / "evaluation").glob("*.json")):
        evaluation = json.loads(file.read_text(encoding="utf-8"))
        if evaluation.get("step") == step:
            results[file.stem] = evaluation["metrics"]
    lines = [
        f"| {group} | {name} | {value:.4f} |"
        for group, metrics in results.items()
        for name, value in metrics.items()
        if value is not None
    ]
    table = (
        "\n".join(["| measured | what | value |", "|---|---|---|", *lines])
        if lines
        else "None was measured at this step."
    )
    return [training, settings, f"## Results\n\n{table}"]
