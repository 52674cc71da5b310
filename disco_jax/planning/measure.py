"""What a training step takes on GPUs that are not there, read from the compiled step of the trainer itself."""

import math
import time

from ml_collections import ConfigDict

from disco_jax.data.tokenizer import load_tokenizer
from disco_jax.gpu_targets import POOL_SHARE, TARGETS, target_devices
from disco_jax.hlo import read_program
from disco_jax.mesh import axes_over_hosts, make_mesh
from disco_jax.models import preset
from disco_jax.models.transformer import check_cudnn_sizes
from disco_jax.planning.report import Cluster, Plan
from disco_jax.training.compiled import compile_step
from disco_jax.training.config import ConfigError, validate
from disco_jax.training.program import Program, check_sizes, make_program
from disco_jax.training.stages import Stage, device_bytes


def make_plan(config: ConfigDict, cluster: Cluster) -> Plan:
    """Compiles the training step of a config for a cluster, which takes one to three minutes; needs no data.

    Call it with JAX_PLATFORMS=cpu in the environment. Attention is planned as XLA's: cuDNN's cannot be compiled without
    its library, and needs less memory.

    Raises:
        ValueError: (or ConfigError, which is one) settings that cannot be run, or not on this cluster.
        ImportError: the extra `plan` is not installed.
    """
    config = config.copy_and_resolve_references()
    if config.get("smoke"):
        raise ConfigError("config.smoke=True runs on CPU whatever the rest says: plan without it")
    planned = config.copy_and_resolve_references()
    planned.data.train = planned.data.train or "not read"
    validate(planned)
    planned.model.attention = "xla"
    check_sizes(config, cluster.size)
    notes = [*_attention_note(config), *_evaluation_note(config, cluster)]
    devices = target_devices(cluster.target, cluster.hosts, cluster.gpus_per_host)
    axes = config.mesh or axes_over_hosts(cluster.hosts)
    sizes = [size for _, size in axes]
    if min(sizes, default=0) > 0 and math.prod(sizes) != cluster.size:  # others are `make_mesh`'s to refuse
        raise ConfigError(
            f"config.mesh={tuple(axes)} has {math.prod(sizes)} devices and the cluster {cluster.size}: "
            "change --hosts and --gpus-per-host, or --config.mesh=\"(('rows',-1),)\""
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    program = make_program(planned, make_mesh(axes, devices), tokenizer.vocab_size, tokenizer.eot_id)
    start = time.monotonic()
    stages = compile_step(program, "cuda").stages
    seconds = time.monotonic() - start
    collectives: dict[str, tuple[int, int]] = {}
    for stage in stages.values():
        for kind, traffic in read_program(stage.compiled.as_text()).by_kind.items():
            calls, size = collectives.get(kind, (0, 0))
            collectives[kind] = (calls + stage.calls * traffic.calls, size + stage.calls * traffic.bytes)
    name, stage = max(stages.items(), key=lambda item: item[1].peak)
    return Plan(
        config=config,
        cluster=cluster,
        mesh=dict(program.mesh.shape),
        pool=int(POOL_SHARE * TARGETS[cluster.target].memory),
        parts=_parts(program, name, stage),
        collectives=collectives,
        flops_per_sample=program.flops_per_sample,
        compile_seconds=seconds,
        notes=tuple(notes),
    )


def _attention_note(config: ConfigDict) -> list[str]:
    """What to know where training may use cuDNN's attention. Raises ConfigError where it is asked for and cannot be."""
    model, supported = preset(config.model.name), 0
    for tower in (model.vision, model.text):
        try:
            check_cudnn_sizes(config.model.dtype, tower.width // tower.heads)
            supported += 1
        except ValueError as error:
            if config.model.attention == "cudnn":
                raise ConfigError(f"config.model.attention='cudnn': {error}") from None
    if config.model.attention == "xla" or not supported:
        return []
    return ["attention is planned as XLA's; where cuDNN's is used, activations are smaller"]


def _evaluation_note(config: ConfigDict, cluster: Cluster) -> list[str]:
    """An evaluation is no step and is not compiled: it needs less, where it encodes no more patches at a time."""
    at_once = config.eval.batch_size // cluster.size
    of_step = config.microbatch or config.batch_size // cluster.size
    if at_once <= (1 - config.model.patch_dropout) * of_step:
        return []
    return [
        f"the evaluation encodes {at_once:,} samples at a time on a GPU, more than the step that is planned here: "
        "lower config.eval.batch_size where that does not fit"
    ]


def _parts(program: Program, name: str, stage: Stage) -> dict[str, int]:
    """What a GPU holds while `stage` runs, by purpose; activations are the rest."""
    state = program.abstract_state
    feature = program.local_batch * program.model.embed_dim * program.encoder.dtype.itemsize
    parts = {
        "parameters": device_bytes(state.params),
        "optimizer": device_bytes((state.opt_state, state.ema)),
        "inputs": stage.inputs,
        # Features of two towers, or their gradients; where the peak is the loss's own, all that is beside the rest.
        "features and loss": 0 if name == "update" else 2 * feature,
    }
    rest = stage.peak - sum(parts.values())
    return parts | (
        {"features and loss": 2 * feature + rest, "activations": 0} if name == "loss" else {"activations": rest}
    )
