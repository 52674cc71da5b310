"""The training loop, the last evaluation and the report."""

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

from disco_jax.data.loader import Batch, DropCounter, train_batches
from disco_jax.evaluation.evaluator import NonFiniteFeatures, SplitFeatures, example_queries
from disco_jax.evaluation.report import write_report
from disco_jax.evaluation.tasks import Destination, Task, run_task
from disco_jax.gpu_targets import peak_flops
from disco_jax.mesh import any_process
from disco_jax.training.checkpoints import Checkpoints
from disco_jax.training.compiled import compile_step
from disco_jax.training.config import ConfigError
from disco_jax.training.initial import first_state
from disco_jax.training.metrics import MetricWriter, read_history
from disco_jax.training.program import Program, TrainState, averaged
from disco_jax.training.setup import Setup, prepare, write_config
from disco_jax.training.signals import StopSignal, TrainingInterrupted

NONFINITE_CURE = (
    "the checkpoints are from before: go on from the last one with --config.resume_changed=True and a lower "
    "config.optimizer.learning_rate or config.optimizer.grad_clip, or with config.on_nonfinite='skip'"
)


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became NaN or inf; the checkpoints are from before."""


def train(config: ConfigDict, workdir: str | os.PathLike[str]) -> dict[str, float]:
    """Trains as `config` says, from the last checkpoint in `workdir` where there is one.

    Order within the loop: dispatch step k, read the metrics of step k-1, evaluate, save, take the next batch. Nothing
    of step k is read before step k+1 is dispatched, except to evaluate or to save.

    Args:
        config: of `default_config`, with changes.
        workdir: gets config.json, metrics.jsonl, tensorboard/, checkpoints/ and, at the end, report.png.

    Returns:
        the metrics of the last evaluation; empty without evaluation data.

    Raises:
        ConfigError: settings, data or a workdir that cannot be run; one line with the cure, before compiling.
        TooManyBadExamples: the dropped share of the data passed `data.max_dropped`.
        TrainingInterrupted: SIGTERM or SIGINT came; the state is saved.
        NonFiniteLossError: with `on_nonfinite="stop"`.
    """
    setup = prepare(config, workdir)
    config = setup.config
    with StopSignal() as stop_signal, Checkpoints(setup.workdir / "checkpoints", config.checkpoint) as checkpoints:
        if checkpoints.latest_step is None:
            state = first_state(setup.program, setup.initial)
        else:
            state = checkpoints.restore(setup.program.abstract_state)
            logging.info("Resumed from step %d", checkpoints.latest_step)
        if setup.is_main:
            write_config(setup)  # only now: settings that don't fit the checkpoint must not replace those that do
        with MetricWriter(
            setup.workdir,
            total_steps=config.total_steps,
            batch_size=config.batch_size,
            wandb_project=config.log.wandb_project,
            config=config.to_dict(),
            resume_step=int(state.step),
            is_main=setup.is_main,
        ) as writer:
            evaluation = _run_steps(setup, state, checkpoints, writer, stop_signal)
    if setup.is_main:
        _write_report(setup, evaluation)
    return evaluation.metrics


@dataclass(frozen=True)
class Evaluation:
    """Metrics as `eval/...`, `train/...` and `NAME/...` of tasks; features of the evaluation split where it was."""

    metrics: dict[str, float]
    features: SplitFeatures | None


def evaluate(setup: Setup, state: TrainState, split: bool, tasks: Sequence[Task]) -> Evaluation:
    """Evaluates the held-out split, and as many training examples as `config.eval.train_examples` says; and tasks.

    Args:
        setup, state: of the run.
        split: whether the split and the training examples are due.
        tasks: those that are.
    """
    metrics: dict[str, float] = {}
    features = None
    step = int(jax.device_get(state.step))
    config, evaluator = setup.config, setup.evaluator
    params = averaged(state) if config.eval.ema else state.params
    splits = (("train", setup.train_source, config.eval.train_examples), ("eval", setup.eval_source, None))
    for name, source, size in splits if split else ():
        if source is None or size == 0:
            continue
        with _evaluation_errors(f"the {name} examples cannot be evaluated", step):
            features = evaluator.features(params, source, size=size)
            metrics |= {f"{name}/{key}": value for key, value in evaluator.retrieval(features).items()}
            if setup.prompts is not None and features.labelled.any():
                scores = evaluator.zero_shot(params, features, setup.prompts)
                metrics |= {f"{name}/zero_shot/{key}": value for key, value in scores.items()}
    for task in tasks:
        with _evaluation_errors(f"config.eval.tasks.{task.name} cannot be evaluated", step):
            # Anew: a run that went on under changed settings comes by a step again.
            folder = setup.workdir / "embed" / task.name / f"step_{step}"
            made_of = {"checkpoint": str(setup.workdir), "step": step, "ema": config.eval.ema}
            outcome = run_task(task, evaluator, params, Destination(folder, made_of, anew=True))
            metrics |= {f"{task.name}/{key}": value for key, value in outcome.metrics.items()}
    logging.info("step %d: %s", step, ", ".join(f"{key} {value:.4f}" for key, value in metrics.items()))
    return Evaluation(metrics, features if setup.eval_source is not None else None)


@contextmanager
def _evaluation_errors(what: str, step: int) -> Iterator[None]:
    """Says what failed, and at which step a model diverged."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error
    except NonFiniteFeatures as error:
        raise NonFiniteLossError(f"step {step}: {error}; {NONFINITE_CURE}") from error


def _run_steps(
    setup: Setup, state: TrainState, checkpoints: Checkpoints, writer: MetricWriter, stop_signal: StopSignal
) -> Evaluation:
    """The steps that are left, with what is due in between, and the last evaluation."""
    config = setup.config
    step = int(state.step)
    if step >= config.total_steps:
        logging.info("All %d steps are done already", step)
        return evaluate(setup, state, True, setup.tasks)
    train_step = compile_step(setup.program)
    recorder = _Recorder(setup, writer, step)
    drops = DropCounter(config.data.max_dropped, grace=min(1000, len(setup.train_source)))
    batches = train_batches(
        setup.train_source,
        setup.preprocessor,
        drops,
        batch_size=config.batch_size,
        seed=config.seed,
        first_step=step,
        threads=config.data.threads,
    )
    evaluation = None
    try:
        with closing(batches), jax.transfer_guard("disallow"):
            for batch in recorder.timed(batches):
                state, metrics = train_step(state, batch.images, batch.tokens)
                step += 1
                recorder.record(step, metrics, batch)
                del batch  # as in `timed`

                last = step == config.total_steps
                stop, save = False, last or step % config.checkpoint.every_steps == 0
                # Processes agree by waiting for each other, so not at every step.
                if jax.process_count() == 1 or step % config.log.every_steps == 0:
                    stop = any_process(stop_signal.received is not None) and not last
                    save = save or stop or any_process(checkpoints.minutes_due())
                split, tasks = (False, []) if stop else due(setup, step)
                save = save or checkpoints.ranks_by([*(("eval", "train") if split else ()), *(t.name for t in tasks)])
                if not (split or tasks or save):
                    continue
                recorder.flush()  # raises where the state is not fit to be saved
                evaluation = None
                if split or tasks:
                    try:
                        evaluation = evaluate(setup, state, split, tasks)
                    except ConfigError:  # faulty evaluation data must not cost the steps
                        checkpoints.save(step, state)
                        raise
                    writer.write(step, evaluation.metrics)
                if save:
                    checkpoints.save(step, state, evaluation.metrics if evaluation else None)
                if stop:
                    raise TrainingInterrupted(stop_signal.received or signal.SIGTERM, step)
                if last:
                    break
                recorder.restart_clock()
    finally:
        if drops.dropped:
            logging.warning("In the training data: %s", drops)
    assert evaluation is not None
    return evaluation


def due(setup: Setup, step: int) -> tuple[bool, list[Task]]:
    """Whether the evaluation split is due after a step, and the tasks that are: all at the end."""

    def now(every_steps: int) -> bool:
        return step == setup.config.total_steps or (every_steps > 0 and step % every_steps == 0)

    every = setup.config.eval.every_steps
    of_tasks = (task.settings.every_steps for task in setup.tasks)
    tasks = [task for task, own in zip(setup.tasks, of_tasks, strict=True) if now(every if own is None else own)]
    return now(every), tasks


class _Recorder:
    """Writes the metrics of a step once the next one is dispatched, and stops the run at a loss that is not finite."""

    def __init__(self, setup: Setup, writer: MetricWriter, first_step: int):
        self._setup, self._writer = setup, writer
        self._pending: tuple[int, dict[str, jax.Array], Sequence[str]] | None = None
        self._recorded = first_step
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves the time up to now out of what is said of speed."""
        self._clock, self._clock_step, self._waited = time.monotonic(), self._recorded, 0.0

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches; the time that passes until they come is waiting for data."""
        start = time.monotonic()
        for batch in batches:
            self._waited += time.monotonic() - start
            yield batch
            del batch  # else it stays while the next one is put together, and can fill the host's memory
            start = time.monotonic()

    def record(self, step: int, metrics: dict[str, jax.Array], batch: Batch) -> None:
        """Takes the metrics of `step`, just dispatched, and writes those of the step before."""
        self.flush()
        self._pending = (step, metrics, batch.keys.tolist())  # not the images

    def flush(self) -> None:
        """Waits for the pending step and writes its metrics where `log.every_steps` says so."""
        if self._pending is None:
            return
        config = self._setup.config
        step, on_devices, keys = self._pending
        self._pending = None
        metrics = {name: float(value) for name, value in jax.device_get(on_devices).items()}
        self._recorded = step
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            self._nonfinite(step, metrics, keys)
        if step % config.log.every_steps and step != config.total_steps:
            return
        seconds = max(time.monotonic() - self._clock, 1e-9)
        samples = (step - self._clock_step) * config.batch_size
        usage = device_usage(self._setup.program, samples / seconds) | {"data_wait": min(self._waited / seconds, 1.0)}
        metrics |= {"samples_per_sec": samples / seconds} | usage
        self.restart_clock()
        self._writer.write(step, metrics)
        self._writer.progress(
            step,
            loss=metrics["loss"],
            samples_per_sec=metrics["samples_per_sec"],
            scale=metrics["logit_scale"],
            usage=usage,
        )

    def _nonfinite(self, step: int, metrics: dict[str, float], keys: Sequence[str]) -> None:
        path = self._setup.workdir / f"nonfinite_step_{step}_process_{jax.process_index()}.txt"
        path.write_text("".join(f"{key}\n" for key in keys), encoding="utf-8")
        found = f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; its examples are in {path}"
        if self._setup.config.on_nonfinite == "stop":
            self._writer.write(step, metrics)
            raise NonFiniteLossError(f"{found}; {NONFINITE_CURE}")
        logging.warning("Skipped the update of %s", found)


def device_usage(program: Program, samples_per_sec: float) -> dict[str, float]:
    """How the devices are used at a speed of the whole mesh.

    `tflops`: model TFLOP/s of each device, without what is computed again; `mfu`: that as a share of the device's peak,
    where `gpu_targets` knows it, which is in bfloat16; `memory_gib`: the most that one of this process's devices has
    held so far, where jax tells it.
    """
    device = program.mesh.local_devices[0]
    flops = samples_per_sec * program.flops_per_sample / program.mesh.size
    usage = {"tflops": flops / 1e12}
    peak = peak_flops(device.device_kind)
    if peak is not None and program.config.model.dtype == "bfloat16":
        usage["mfu"] = flops / peak
    held = [stats["peak_bytes_in_use"] for d in program.mesh.local_devices if (stats := d.memory_stats())]
    if held:
        usage["memory_gib"] = max(held) / 2**30
    return usage


def _write_report(setup: Setup, evaluation: Evaluation) -> None:
    queries: tuple[Any, ...] = ()
    if setup.eval_source is not None and evaluation.features is not None:
        queries = example_queries(setup.eval_source, evaluation.features, setup.preprocessor)
    path = setup.workdir / "report.png"
    title = f"{setup.config.model.name}, {setup.workdir.name}"
    write_report(path, read_history(setup.workdir), *queries, title=title)
    logging.info("The report is in %s", path)
