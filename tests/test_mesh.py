"""Meshes, simulated devices, and how a process finds out which of how many it is."""

import hashlib
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disco_jax import mesh as mesh_lib
from disco_jax.mesh import (
    any_process,
    batch_sharding,
    default_axes,
    initialize_processes,
    make_mesh,
    replicated,
    simulate_cpu_devices,
)


@pytest.mark.parametrize(
    "axes, shape",
    [
        ([("data", 8)], {"data": 8}),
        ([("data", -1)], {"data": 8}),
        ([("replica", 2), ("data", -1)], {"replica": 2, "data": 4}),
        ([("data", 8), ("model", -1)], {"data": 8, "model": 1}),
        ([("data", 2), ("model", 2)], {"data": 2, "model": 2}),
    ],
)
def test_mesh(axes, shape):
    mesh = make_mesh(axes)
    assert dict(mesh.shape) == shape and mesh.axis_names == tuple(shape)
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * len(axes)
    assert list(mesh.devices.flat) == jax.devices()[: mesh.size]  # fewer than there are: the first ones


@pytest.mark.parametrize(
    "axes, message",
    [
        ([("data", 16)], r"asks for 16 devices, there are 8 \(cpu\): .*config.cpu_devices=16"),
        ([("data", 16), ("model", -1)], "asks for 16 devices, there are 8"),
        ([("data", 3), ("model", -1)], "8 devices do not divide by 3"),
        ([("data", -1), ("model", -1)], "one of them may be -1"),
        ([("data", 0)], "sizes of at least 1"),
        ([("data", 2), ("data", 4)], "different names"),
        ([], "at least one axis"),
    ],
)
def test_refused_mesh(axes, message):
    with pytest.raises(ValueError, match=message) as error:
        make_mesh(axes)
    assert "\n" not in str(error.value)


def test_several_processes_must_use_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    make_mesh([("data", 8)])
    with pytest.raises(ValueError, match="leaves out some of the 8 devices of 2 processes"):
        make_mesh([("data", 4)])


def test_shardings():
    mesh = make_mesh([("replica", 2), ("data", 4)])
    x = jnp.arange(16).reshape(16, 1)
    divided = jax.device_put(x, batch_sharding(mesh))
    assert [s.data.ravel().tolist() for s in divided.addressable_shards] == [[2 * i, 2 * i + 1] for i in range(8)]
    whole = jax.device_put(x, replicated(mesh))
    assert all(s.data.shape == (16, 1) for s in whole.addressable_shards)


def test_simulated_devices_after_jax_has_started():
    assert len(jax.devices()) == 8
    simulate_cpu_devices(8)  # as they are already
    with pytest.raises(ValueError, match="cannot simulate 4 CPU devices: jax already runs on 8 cpu devices; restart"):
        simulate_cpu_devices(4)
    with pytest.raises(ValueError, match="at least 1: got 0"):
        simulate_cpu_devices(0)


@pytest.mark.parametrize(
    "hosts, axes",
    [
        (["a"], [("rows", -1)]),
        (["a", "b"], [("cols", 2), ("rows", -1)]),
        (["a", "a", "b", "b", "c", "c", "d", "d"], [("cols", 4), ("rows", -1)]),  # a process a GPU
        (["a", "a", "a", "a"], [("rows", -1)]),
        (["a", "b", "a", "b"], [("rows", -1)]),  # devices of a host are not neighbours
        (["a", "a", "a", "b"], [("rows", -1)]),  # unequal
    ],
)
def test_default_axes(monkeypatch, hosts, axes):
    """Of 8 devices, divided equally over one process for each entry of `hosts`."""
    devices = [SimpleNamespace(process_index=i * len(hosts) // 8) for i in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: len(hosts))
    digests = [np.frombuffer(hashlib.sha256(host.encode()).digest(), np.uint8) for host in hosts]
    monkeypatch.setattr(mesh_lib.multihost_utils, "process_allgather", lambda mine: np.stack(digests))
    assert default_axes() == axes


def test_any_process_of_one():
    assert any_process(True) and not any_process(False)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "host0:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
BY_HAND = {"cluster_detection_method": "deactivate"}


@pytest.fixture
def calls(monkeypatch):
    """What jax.distributed.initialize was called with, in an environment without any launcher."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "JAX_"))]:
        monkeypatch.delenv(name)
    made = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: made.append((args, kwargs)))
    return made


@pytest.mark.parametrize(
    "settings, environment, call, line",
    [
        (("a:1", 3, 0), SLURM | JAX, (("a:1", 3, 0), BY_HAND), "process 0 of 3, coordinator a:1, by explicit settings"),
        ((), JAX | SLURM, (("host0:1234", 2, 1), BY_HAND), "process 1 of 2, coordinator host0:1234, by the JAX_"),
        ((), SLURM, ((), {"cluster_detection_method": "slurm"}), "process 1 of 2, by slurm's environment"),
        ((), OPEN_MPI, ((), {"cluster_detection_method": "ompi"}), "process 3 of 4, by ompi's environment"),
    ],
)
def test_several_processes(calls, monkeypatch, settings, environment, call, line):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert initialize_processes(*settings).startswith(line)
    assert calls == [call]


@pytest.mark.parametrize("missing", [*SLURM, *OPEN_MPI, *JAX])
def test_a_half_set_environment_is_one_process(calls, monkeypatch, missing):
    (environment,) = [e for e in (SLURM, OPEN_MPI, JAX) if missing in e]
    for name, value in environment.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    assert initialize_processes().endswith(f"environment lacks {missing}")
    assert not calls


@pytest.mark.parametrize("environment", [{}, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}])
def test_one_process(calls, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = initialize_processes()
    assert line == "one process: no settings and no cluster environment of several tasks"
    assert initialize_processes() == line and not calls


def test_the_line_is_logged(calls, monkeypatch):
    logged = []
    monkeypatch.setattr(mesh_lib.logging, "info", lambda message, *args: logged.append(message % args))
    assert logged == [] and [initialize_processes()] == logged


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"coordinator": "a:1"}, "need all of coordinator, num_processes, process_id: num_processes, process_id not"),
        ({"num_processes": 2, "process_id": 0}, "coordinator not given"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "'a' must be host:port"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "process_id 2 must be in 0 .. num_processes - 1"),
    ],
)
def test_refused_settings(calls, settings, message):
    with pytest.raises(ValueError, match=message):
        initialize_processes(**settings)
    assert not calls


def test_refused_variable(calls, monkeypatch):
    for name, value in (JAX | {"JAX_NUM_PROCESSES": "two"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES='two' is no whole number"):
        initialize_processes()


PROCESS = """
import socket, sys
import jax, jax.numpy as jnp, numpy as np
from disco_jax.losses import contrastive_loss, dense_contrastive_loss
from disco_jax.mesh import any_process, batch_sharding, default_axes, make_mesh
from disco_jax.mesh import initialize_processes, simulate_cpu_devices

me = int(sys.argv[2])
simulate_cpu_devices(2)
print(initialize_processes(sys.argv[1], 2, me))
initialize_processes(sys.argv[1], 2, me)
assert default_axes() == [("rows", -1)]
socket.gethostname = lambda: f"host {me}"
mesh = make_mesh(default_axes())
assert dict(mesh.shape) == {"cols": 2, "rows": 2} and jax.process_count() == 2
with jax.transfer_guard("disallow"):
    assert any_process(me == 1) and not any_process(False)

images, texts = np.random.default_rng(0).normal(size=(2, 12, 5)).astype(np.float32)
mine = slice(6 * me, 6 * me + 6)
placed = [jax.make_array_from_process_local_data(batch_sharding(mesh), x[mine]) for x in (images, texts)]
scale = jnp.float32(2)
loss = lambda i, t: contrastive_loss(i, t, scale, mesh=mesh, rows="rows", cols="cols")
value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*placed)
expected = jax.jit(jax.value_and_grad(dense_contrastive_loss, (0, 1)))(images, texts, scale)
np.testing.assert_allclose(value.addressable_data(0), expected[0], rtol=1e-5)
for got, want in zip(gradients, expected[1]):
    for shard in got.addressable_shards:
        np.testing.assert_allclose(shard.data, want[shard.index], rtol=1e-4, atol=1e-6)
print("done")
"""


def test_two_processes_on_this_machine():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for index, process in enumerate(started):
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert f"process {index} of 2, coordinator {address}, by explicit settings" in out and "done" in out
    finally:
        for process in started:
            process.kill()
