import subprocess
import sys

SCRIPT = """
from absl import logging
from disco_jax.command import log_progress
from disco_jax.mesh import initialize_processes

log_progress()
log_progress()
logging.info("of others")
logging.warning("to be read")
initialize_processes()
"""


def test_the_log_has_our_progress_and_the_warnings_of_all():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    messages = [line.partition("] ")[2] for line in ran.stderr.splitlines()]
    assert len(messages) == 2 and messages[0] == "to be read" and messages[1].startswith("one process")
