"""What the commands share: the progress they show, and that whatever is wrong with the flags ends with one line."""

import logging as python_logging
import sys
from pathlib import Path
from typing import NoReturn

from absl import flags, logging


def log_progress() -> None:
    """Shows on stderr the progress of this project, and the warnings of all; in a notebook too. Twice is harmless."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # where there are none; absl would warn of it
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_is_ours)


def _is_ours(record: python_logging.LogRecord) -> bool:
    # Orbax logs dozens of lines a checkpoint.
    return record.levelno >= python_logging.WARNING or Path(__file__).parent in Path(record.pathname).parents


def parse_flags(argv: list[str], *, command: str, status: int) -> list[str]:
    """As absl does, but a wrong config file, key or value ends with one line as well; see `leave`."""
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:
        leave(f"{command}: unknown setting {one_line(error.args[0])}", status)
    except (TypeError, ValueError, OSError, flags.Error) as error:
        leave(f"{command}: {one_line(error)}", status)
    except Exception as error:  # of the config file
        leave(f"{command}: the config file fails with {type(error).__name__}: {one_line(error)}", status)


def one_line(message: object) -> str:
    """The words of a message without its line breaks."""
    return " ".join(str(message).replace("\\n", " ").split())  # a KeyError quotes its message


def leave(message: str, status: int) -> NoReturn:
    """Ends the program with a line on stderr and an exit status."""
    print(message, file=sys.stderr)
    sys.exit(status)
