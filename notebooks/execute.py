"""Executes the notebooks beside it: python notebooks/execute.py [--update] [NAME.ipynb ...]

Each runs in a folder of its own that is removed afterwards. A cell that raises or warns is a failure, and so is a
notebook that is kept without the output of every cell; --update keeps the new output instead.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

HERE = Path(__file__).parent
WARNING = re.compile(r"\w*Warning\b.*|^[WEF]\d{4} .*", re.MULTILINE)  # Python's, and absl's of this or a worse level


def main() -> None:
    """Executes those that are named, or all; the exit status is 1 where one fails."""
    parser = argparse.ArgumentParser(description="Executes the notebooks.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="(default: all beside this script)")
    parser.add_argument("--update", action="store_true", help="keep the new output in the files")
    args = parser.parse_args()
    failures = []
    for path in args.notebooks or sorted(HERE.glob("*.ipynb")):
        print(f"{path.name}: executing", end=" ", flush=True)
        start = time.perf_counter()
        kept = nbformat.read(path, as_version=4)
        faults = [] if args.update else unexecuted(kept)
        executed = nbformat.from_dict(kept)
        faults += execute(executed)
        print(f"took {time.perf_counter() - start:.0f} s", flush=True)
        if args.update and not faults:
            nbformat.write(executed, path)
        failures += [f"{path.name}: {fault}" for fault in faults]
    if failures:
        sys.exit("\n".join(failures))


def execute(notebook: NotebookNode) -> list[str]:
    """Fills in the output of every cell and clears what differs from machine to machine; returns what went wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        # Settings and start-up files of the user's own have no part in it.
        environment = {"IPYTHONDIR": f"{folder}/.ipython", "JUPYTER_RUNTIME_DIR": f"{folder}/.jupyter"}
        os.environ.update(environment)
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],  # of the kernel itself, which warns of its own ports
            resources={"metadata": {"path": str(folder)}},
            timeout=None,
            record_timing=False,
            coalesce_streams=True,
        )
        try:
            client.execute()
        except CellExecutionError as error:
            return [str(error)]
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    streams = [output for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "stream"]
    for stream in streams:
        stream.text = stream.text.replace(f"{folder}/", "")
    return [f"a cell warns: {line}" for x in streams if x.name == "stderr" for line in WARNING.findall(x.text)]


def unexecuted(notebook: NotebookNode) -> list[str]:
    """Why the kept output is not that of one execution from top to bottom, if it is not."""
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        return [f"is kept without the output of one execution (cells {counts}): make notebooks-update"]
    return []


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells with code, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


if __name__ == "__main__":
    main()
