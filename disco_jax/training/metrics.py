"""Where a run's numbers go: metrics.jsonl, TensorBoard, W&B, and a progress bar or log lines."""

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from absl import logging
from tensorboardX import SummaryWriter
from tqdm import tqdm

METRICS_FILE = "metrics.jsonl"


class MetricWriter:
    """Writes scalars by step; use it as a context manager.

    `metrics.jsonl` holds one JSON object a line, `{"step": 100, "loss": 3.2, ...}`, flushed at every write;
    `null` stands for NaN and infinity, which JSON does not have. TensorBoard's files lie in `tensorboard/`. A resume
    drops what was written after the step it resumes from, so every step is there once and in order.

    Args:
        workdir: the run's folder; made if missing.
        total_steps: steps of the whole run, for the bar and the time left.
        batch_size: examples a step, for the time left.
        wandb_project: of Weights & Biases, or None to leave it out. A resume continues the run there.
        config: the run's config, shown by W&B.
        resume_step: the last finished step of the run that is resumed; 0 starts `metrics.jsonl` anew.
        is_main: False makes every method do nothing (all processes but the first).

    Raises:
        ImportError: W&B is asked for and not installed.
        ValueError: `metrics.jsonl` is damaged before its last line.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        total_steps: int,
        batch_size: int,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
        resume_step: int = 0,
        is_main: bool = True,
    ) -> None:
        self._is_main = is_main
        self._total_steps = total_steps
        self._batch_size = batch_size
        self._bar: tqdm | None = None
        self._wandb: Any = None
        if not is_main:
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        if wandb_project is not None:
            self._wandb = _start_wandb(workdir, wandb_project, config, resume=resume_step > 0)
        rows = [row for row in read_history(workdir) if row["step"] <= resume_step] if resume_step else []
        _replace_history(workdir, rows)
        self._jsonl = open(workdir / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115
        self._tensorboard = SummaryWriter(
            str(workdir / "tensorboard"), purge_step=resume_step + 1 if resume_step else 0
        )
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=resume_step,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {desc}",
                dynamic_ncols=True,
            )
            logging.get_absl_handler().python_handler.addFilter(self._clear_bar)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def write(self, step: int, scalars: Mapping[str, SupportsFloat]) -> None:
        """Append one row; the part of a name before its first slash is TensorBoard's group."""
        if not self._is_main:
            return
        values = {name: float(value) for name, value in scalars.items()}
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._jsonl.write(json.dumps({"step": step} | row, allow_nan=False) + "\n")
        self._jsonl.flush()
        for name, value in values.items():
            # tensorboardX logs a line for every tag it has to change itself, such as R@1.
            self._tensorboard.add_scalar(re.sub(r"[^-/\w.]", "_", name), value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def progress(
        self,
        step: int,
        *,
        loss: SupportsFloat,
        samples_per_sec: SupportsFloat,
        scale: SupportsFloat,
        usage: Mapping[str, float] | None = None,
    ) -> None:
        """Show where the run is: in the bar where stderr is a terminal, else as one log line a call.

        `usage` may hold `tflops`, `mfu`, `memory_gib` and `data_wait`, as in `metrics.jsonl`.
        """
        if not self._is_main:
            return
        rate = float(samples_per_sec)
        left = tqdm.format_interval((self._total_steps - step) * self._batch_size / rate) if rate > 0 else "?"
        text = f"loss {float(loss):.4f}, {rate:,.0f} samples/s, scale {float(scale):.2f}, {left} left"
        words = {
            "tflops": "{:.3g} TFLOP/s a device",
            "mfu": "MFU {:.1%}",
            "memory_gib": "{:.1f} GiB",
            "data_wait": "{:.0%} waiting for data",
        }
        text = ", ".join([text, *(words[name].format(value) for name, value in (usage or {}).items())])
        if self._bar is None:
            logging.info("step %d/%d: %s", step, self._total_steps, text)
        else:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Flush and close everything; a second call does nothing."""
        if not self._is_main or self._jsonl.closed:
            return
        self._jsonl.close()
        self._tensorboard.close()
        if self._bar is not None:
            logging.get_absl_handler().python_handler.removeFilter(self._clear_bar)
            self._bar.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _clear_bar(self, record: object) -> bool:
        # A log line would else be printed behind the bar; the bar comes back below it.
        assert self._bar is not None
        self._bar.clear()
        return True


def read_history(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` in order; no rows where there is no file yet.

    A last line that a killed process left half-written is ignored.

    Raises:
        ValueError: any other line is no JSON object with a step.
    """
    path = Path(workdir) / METRICS_FILE
    if not path.exists():
        return []
    rows = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is no row of metrics; mend or remove the line") from None
        else:
            rows.append(row)
    return rows


def _replace_history(workdir: Path, rows: list[dict[str, Any]]) -> None:
    temporary = workdir / f"{METRICS_FILE}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, workdir / METRICS_FILE)


def _start_wandb(workdir: Path, project: str, config: Mapping[str, Any] | None, *, resume: bool) -> Any:
    import wandb  # an extra

    id_file = workdir / "wandb_run_id.txt"
    run_id = id_file.read_text() if resume and id_file.exists() else None
    run = wandb.init(project=project, dir=str(workdir), config=config, id=run_id, resume="allow")
    id_file.write_text(run.id)
    return run
