"""Checkpoints of a run: saved in the background, committed atomically, the last few and the best kept."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from ml_collections import ConfigDict
from orbax.checkpoint import v1 as ocp

from disco_jax.training.config import ConfigError


class Checkpoints:
    """The checkpoints in `directory`, as `config.checkpoint` says; a context manager.

    Only committed steps count: what a killed process left half-written is removed. An error of a save in the background
    is raised by the next save or on leaving.
    """

    def __init__(self, directory: Path, settings: ConfigDict):
        policies = ocp.training.preservation_policies
        keep: list[Any] = [policies.LatestN(settings.keep_last)]
        if settings.keep_best:
            keep.append(
                policies.BestN(
                    get_metric_fn=lambda metrics: metrics[settings.best_metric],
                    n=settings.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._settings = settings
        self._checkpointer = ocp.training.Checkpointer(
            directory, preservation_policy=policies.AnyPreservationPolicy(keep), cleanup_tmp_directories=True
        )
        self._last_save = time.monotonic()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._checkpointer.close()

    @property
    def latest_step(self) -> int | None:
        """The last committed step."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def minutes_due(self) -> bool:
        """Whether the last save lies longer back than the settings want."""
        minutes = self._settings.every_minutes
        return minutes > 0 and time.monotonic() - self._last_save > 60 * minutes

    def restore(self, abstract_state: Any) -> Any:
        """The latest state, in the shapes and shardings of `abstract_state`."""
        return self._checkpointer.load_checkpointables(self._checkpointer.latest, {"state": abstract_state})["state"]

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Starts to save `state`; it may be donated as soon as this returns. `metrics` rank it among the best."""
        if metrics is not None and self._settings.best_metric not in metrics:
            metrics = None
        self._checkpointer.save_checkpointables_async(
            step, {"state": state}, force=True, metrics=None if metrics is None else dict(metrics)
        )
        self._last_save = time.monotonic()


def check_space(directory: Path, abstract_state: Any) -> None:
    """Raises `ConfigError` when the disk has no room for two checkpoints: one kept, one being written."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_state))
    free = shutil.disk_usage(directory).free
    if free < 2 * size:
        raise ConfigError(
            f"{directory} has {free / 2**30:.2f} GiB free, but a checkpoint takes {size / 2**30:.2f} GiB and two must "
            "fit: free some space or choose another --workdir"
        )
