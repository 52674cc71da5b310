"""Checkpoints of a run: saved in the background, committed atomically, the last few and the best kept."""

import shutil
import time
from collections.abc import Iterable, Mapping
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

    def ranks_by(self, groups: Iterable[str]) -> bool:
        """Whether the metric of the best checkpoints is of one of these groups, the first words of its name."""
        return self._settings.keep_best > 0 and self._settings.best_metric.split("/")[0] in groups

    def restore(self, abstract_state: Any) -> Any:
        """The latest state, in the shapes and shardings of `abstract_state`; raises `ConfigError` if that fails."""
        latest = self._checkpointer.latest
        try:
            return self._checkpointer.load_checkpointables(latest, {"state": abstract_state})["state"]
        except Exception as error:  # of many kinds, many lines long
            found = next(iter(str(error).splitlines()), type(error).__name__)
            raise ConfigError(
                f"checkpoint {latest.path} does not fit the settings or is damaged ({found[:200]}): "
                "go back to the settings that wrote it, or remove that folder to go on from the one before"
            ) from error

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Starts to save `state`; it may be donated as soon as this returns. `metrics` rank it among the best."""
        best = self._settings.best_metric
        ranked = metrics is not None and best in metrics
        with jax.transfer_guard("allow"):
            self._checkpointer.save_checkpointables_async(
                step, {"state": state}, force=True, metrics=dict(metrics) if metrics and ranked else None
            )
        if metrics and self.ranks_by(name.split("/")[0] for name in metrics) and not ranked:
            raise ConfigError(
                f"config.checkpoint.best_metric={best!r} is not measured: use one of {', '.join(metrics)}"
            )
        self._last_save = time.monotonic()


def steps_in(directory: Path) -> list[int]:
    """The committed steps in a run's folder of checkpoints, in order; none where there is no folder."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())


def check_space(directory: Path, settings: ConfigDict, abstract_state: Any) -> None:
    """Raises `ConfigError` when the disk has no room for the checkpoints that will be kept and one being written."""
    count = max(1, settings.keep_last + settings.keep_best + 1 - len(steps_in(directory)))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_state))
    free = shutil.disk_usage(directory.parent).free
    if free < count * size:
        raise ConfigError(
            f"{directory.parent} has {free / 2**30:.2f} GiB free, but {count} checkpoints of {size / 2**30:.2f} GiB "
            "must fit: free some space, choose another --workdir or lower config.checkpoint.keep_last"
        )
