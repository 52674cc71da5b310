"""Trains a CLIP: python train.py --config configs/NAME.py --workdir DIR [--config.key=value ...]"""

import os
from functools import partial

from absl import app, flags
from ml_collections import config_flags

from disco_jax.command import leave, log_progress, one_line, parse_flags
from disco_jax.gpu_targets import POOL_SHARE
from disco_jax.training import ConfigError, NonFiniteLossError, TooManyBadExamples, TrainingInterrupted, train

CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.")
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run's files go; the same command resumes it.", required=True)
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Runs the training; what cannot be run ends with one line and exit status 1."""
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(POOL_SHARE))  # as the planner counts; jax's own is 0.75
    log_progress()
    try:
        train(CONFIG.value, WORKDIR.value)
    except (ConfigError, NonFiniteLossError, TooManyBadExamples) as error:
        leave(f"train.py: {one_line(error)}", 1)
    except OSError as error:
        leave(f"train.py: {one_line(error)}: once that is mended, the same command goes on from the last checkpoint", 1)
    except KeyboardInterrupt:
        leave("train.py: interrupted; the same command goes on from the last checkpoint", 130)
    except TrainingInterrupted as interrupted:
        leave(f"train.py: {interrupted}", 128 + interrupted.signum)


if __name__ == "__main__":
    app.run(main, flags_parser=partial(parse_flags, command="train.py", status=1))
