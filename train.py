"""Trains a CLIP: python train.py --config configs/NAME.py --workdir DIR [--config.key=value ...]"""

import logging as python_logging
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

import disco_jax
from disco_jax.training import ConfigError, NonFiniteLossError, TooManyBadExamples, TrainingInterrupted, train

CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.")
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run's files go; the same command resumes it.", required=True)
flags.mark_flag_as_required("config")


def parse_flags(argv: list[str]) -> list[str]:
    """As absl does, but a wrong config file, key or value ends with one line as well."""
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:
        sys.exit(f"train.py: unknown setting {one_line(error.args[0])}")
    except (TypeError, ValueError, OSError, flags.Error) as error:
        sys.exit(f"train.py: {one_line(error)}")
    except Exception as error:  # of the config file
        sys.exit(f"train.py: the config file fails with {type(error).__name__}: {one_line(error)}")


def one_line(message: object) -> str:
    """The words of a message without its line breaks."""
    return " ".join(str(message).replace("\\n", " ").split())  # a KeyError quotes its message


def is_ours(record: python_logging.LogRecord) -> bool:
    """Warnings of all, but the progress of this project only: Orbax logs dozens of lines a checkpoint."""
    return record.levelno >= python_logging.WARNING or Path(disco_jax.__path__[0]) in Path(record.pathname).parents


def main(argv: list[str]) -> None:
    """Runs the training; what cannot be run ends with one line and exit status 1."""
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(is_ours)
    try:
        train(CONFIG.value, WORKDIR.value)
    except (ConfigError, NonFiniteLossError, TooManyBadExamples) as error:
        sys.exit(f"train.py: {one_line(error)}")
    except OSError as error:
        sys.exit(f"train.py: {one_line(error)}: once that is mended, the same command goes on from the last checkpoint")
    except KeyboardInterrupt:
        print("train.py: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
    except TrainingInterrupted as interrupted:
        print(f"train.py: {interrupted}", file=sys.stderr)
        sys.exit(128 + interrupted.signum)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
