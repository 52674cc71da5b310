"""Processes, devices and the mesh that they form."""

import hashlib
import itertools
import json
import math
import os
import socket
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# What jax's detection of a cluster, by jax's name of it, reads; "jax" is ours. First the number of processes, then the
# index of this one.
_ENVIRONMENTS = {
    "jax": ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"),
    "slurm": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"),
    "ompi": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_MCA_orte_hnp_uri",
    ),
}


def initialize_processes(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> str:
    """Connect the processes of a run; call it before anything that asks jax for its devices. Twice is harmless.

    Explicit settings come first; else a complete cluster environment (JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES
    and JAX_PROCESS_ID, or Slurm's or Open MPI's of more than one task); else this is one process. A half-set
    environment, as an interactive shell inside a Slurm job has it, counts as none, so that nobody waits for processes
    that were never started. Under Slurm and Open MPI jax gives each process one GPU: start one task a GPU.

    Args:
        coordinator: "host:port" of process 0, reachable from all.
        num_processes: how many processes there are.
        process_id: index of this one, from 0.

    Returns:
        One line, also logged, that says what was chosen and why.

    Raises:
        ValueError: explicit settings that are incomplete or out of range, or a variable that is no whole number.
    """
    if jax.distributed.is_initialized():
        return "processes are connected already"

    explicit = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    unset = [name for name, value in explicit.items() if value is None]
    if 0 < len(unset) < len(explicit):
        raise ValueError(f"explicit process settings need all of {', '.join(explicit)}: {', '.join(unset)} not given")
    if coordinator is not None and num_processes is not None and process_id is not None:
        return _connect(coordinator, num_processes, process_id, "explicit settings")

    half_set = []
    for name, variables in _ENVIRONMENTS.items():
        missing = [variable for variable in variables if not os.environ.get(variable)]
        if not missing:
            count, index = _whole_number(variables[0]), _whole_number(variables[1])
            if name == "jax":
                return _connect(os.environ["JAX_COORDINATOR_ADDRESS"], count, index, "the JAX_* variables")
            if count > 1:
                line = _log(f"process {index} of {count}, by {name}'s environment")
                jax.distributed.initialize(cluster_detection_method=name)
                return line
        elif len(missing) < len(variables):
            half_set.append(f"{name}'s environment lacks {', '.join(missing)}")
    return _log(f"one process: {'; '.join(half_set) or 'no settings and no cluster environment of several tasks'}")


def _connect(coordinator: str, num_processes: int, process_id: int, why: str) -> str:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"coordinator {coordinator!r} must be host:port ({why})")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process_id {process_id} must be in 0 .. num_processes - 1 = {num_processes - 1} ({why})")
    line = _log(f"process {process_id} of {num_processes}, coordinator {coordinator}, by {why}")
    # "deactivate": jax would otherwise look for a cluster all the same, to choose this process's devices.
    jax.distributed.initialize(coordinator, num_processes, process_id, cluster_detection_method="deactivate")
    return line


def _whole_number(variable: str) -> int:
    try:
        return int(os.environ[variable])
    except ValueError:
        raise ValueError(
            f"environment variable {variable}={os.environ[variable]!r} is no whole number: mend or unset it"
        ) from None


def _log(line: str) -> str:  # called before connecting, which waits for the other processes
    logging.info("%s", line)
    return line


def simulate_cpu_devices(n: int) -> None:
    """Let the CPU stand for `n` devices; call it before anything that asks jax for its devices.

    Raises:
        ValueError: `n` is not positive, or jax already runs on other devices.
    """
    if n < 1:
        raise ValueError(f"cpu_devices must be at least 1: got {n}")
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:  # jax has its devices already; they may still be the ones asked for
        devices = jax.local_devices()
        if devices[0].platform != "cpu" or len(devices) != n:
            raise ValueError(
                f"cannot simulate {n} CPU devices: jax already runs on {len(devices)} {devices[0].platform} devices; "
                "restart, and ask for them before jax is first used"
            ) from None
    else:
        jax.config.update("jax_platforms", "cpu")


def make_mesh(axes: Sequence[tuple[str, int]], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The devices of all processes as a mesh.

    Args:
        axes: name and size of each axis, outermost first; one size may be -1 and then takes the rest. A single
            process may use fewer devices than there are: the first ones.
        devices: others than those of jax, e.g. absent ones.

    Raises:
        ValueError: wrong names or sizes, or not as many devices as asked for.
    """
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    asked = f"mesh {dict(axes)}"
    if not names or len(set(names)) < len(names):
        raise ValueError(f"mesh {list(axes)} needs at least one axis, and different names")
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"{asked} needs sizes of at least 1; one of them may be -1, the rest of the devices")

    fixed = math.prod(size for size in sizes if size != -1)
    simulate = f", or simulate devices on the CPU with config.cpu_devices={fixed}" if devices is None else ""
    devices = jax.devices() if devices is None else devices
    if fixed > len(devices):
        raise ValueError(
            f"{asked} asks for {fixed} devices, there are {len(devices)} ({devices[0].platform}): "
            f"lower its sizes{simulate}"
        )
    if -1 in sizes:
        if len(devices) % fixed:
            raise ValueError(f"{asked} leaves no whole size for -1: {len(devices)} devices do not divide by {fixed}")
        sizes[sizes.index(-1)] = len(devices) // fixed
    elif fixed < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"{asked} leaves out some of the {len(devices)} devices of {jax.process_count()} processes: "
            "give one axis the size -1, or start fewer processes"
        )
    used = math.prod(sizes)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices[:used])


def default_axes() -> list[tuple[str, int]]:
    """Axes for `make_mesh` that keep most of the loss's traffic within hosts: all processes must call it.

    One axis, "rows", on one host, and on hosts with unequal numbers of devices or with processes in mixed order; else
    the hosts are "cols" and the devices of each "rows". A host is known by its name.
    """
    host = np.frombuffer(hashlib.sha256(socket.gethostname().encode()).digest(), np.uint8)
    hosts = np.reshape(multihost_utils.process_allgather(host), (jax.process_count(), -1))
    of_devices = [hosts[device.process_index].tobytes() for device in jax.devices()]
    runs = [len(list(run)) for _, run in itertools.groupby(of_devices)]
    if len(runs) != len(set(of_devices)) or len(set(runs)) > 1:
        return axes_over_hosts(1)
    return axes_over_hosts(len(runs))


def axes_over_hosts(hosts: int) -> list[tuple[str, int]]:
    """What `default_axes` gives for so many hosts of equally many devices."""
    return [("cols", hosts), ("rows", -1)] if hosts > 1 else [("rows", -1)]


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading dimension divided over all axes of the mesh."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def global_array(sharding: NamedSharding, local: np.ndarray) -> jax.Array:
    """One array over all devices, of the rows that every process has of it."""
    with jax.transfer_guard("allow"):  # of several processes jax takes this for an implicit transfer
        return jax.make_array_from_process_local_data(sharding, local)


def any_process(flag: bool) -> bool:
    """Whether `flag` is true on any process. All processes must call it, in the same order as other collectives."""
    if not jax.distributed.is_initialized():
        return flag
    with jax.transfer_guard("allow"):  # one flag; the training loop forbids transfers
        return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def gather_json(value: Any) -> list[Any]:
    """What every process gives, in their order: anything that JSON can say. All processes must call it, as above."""
    if not jax.distributed.is_initialized():
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with jax.transfer_guard("allow"):
        sizes = np.reshape(multihost_utils.process_allgather(np.asarray(len(data), np.int32)), -1)
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: len(data)] = data
        texts = np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1))
    return [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes, strict=True)]
