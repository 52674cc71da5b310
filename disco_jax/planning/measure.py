"""What a training step takes on GPUs that are not there, read from the compiled step of the trainer itself."""

import math
import time

from ml_collections import ConfigDict

from disco_jax.data.tokenizer import load_tokenizer
from disco_jax.gpu_targets import POOL_SHARE, TARGETS, target_devices
from disco_jax.hlo import read_program
from disco_jax.mesh import make_mesh
from disco_jax.models import preset
from disco_jax.models.transformer import check_cudnn_sizes
from disco_jax.planning.report import Cluster, Plan
from disco_jax.training.compiled import compile_step
from disco_jax.training.config import ConfigError, validate
from disco_jax.training.program import Program, check_sizes, make_program
from disco_jax.training.stages import Stage, abstract_batch, device_bytes


def make_plan(config: ConfigDict, cluster: Cluster) -> Plan:
    """Compiles the training step of a config for a cluster, which takes one to three minutes; needs no data.

    Call it with JAX_PLATFORMS=cpu in the environment. Attention is planned as XLA's: cuDNN's cannot be compiled without
    its library, and needs less memory.

    Raises:
        ValueError: (or ConfigError, which is one) settings that cannot be run, or not on this cluster.
        ImportError: the extra `plan` is not installed.
    """
    if config.get("smoke"):
        raise ConfigError("config.smoke=True runs on CPU whatever the rest says: plan without it")
    config = config.copy_and_resolve_references()
    config.data.train = config.data.train or "not read"
    validate(config)
    notes = []
    model = preset(config.model.name)
    if config.model.attention == "cudnn":
        for tower in (model.vision, model.text):
            check_cudnn_sizes(config.model.dtype, tower.width // tower.heads)
    if config.model.attention != "xla":
        notes.append("attention is planned as XLA's; where cuDNN's is used, activations are smaller")
        config.model.attention = "xla"
    check_sizes(config, cluster.size)
    devices = target_devices(cluster.target, cluster.hosts, cluster.gpus_per_host)
    by_hosts = [("cols", cluster.hosts), ("rows", -1)] if cluster.hosts > 1 else [("rows", -1)]  # as default_axes
    axes = config.mesh or by_hosts
    sizes = [size for _, size in axes]
    if -1 not in sizes and math.prod(sizes) != cluster.size:
        raise ConfigError(
            f"config.mesh={tuple(axes)} has {math.prod(sizes)} devices and the cluster {cluster.size}: "
            "change --hosts and --gpus-per-host, or --config.mesh=\"(('rows',-1),)\""
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    program = make_program(config, make_mesh(axes, devices), tokenizer.vocab_size, tokenizer.eot_id)
    start = time.monotonic()
    stages = compile_step(program, "cuda").stages
    seconds = time.monotonic() - start
    collectives = dict.fromkeys(
        ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"), (0, 0)
    )
    for stage in stages.values():
        for kind, traffic in read_program(stage.compiled.as_text()).by_kind.items():
            calls, size = collectives[kind]
            collectives[kind] = (calls + stage.calls * traffic.calls, size + stage.calls * traffic.bytes)
    name, stage = max(stages.items(), key=lambda item: item[1].peak)
    return Plan(
        cluster=cluster,
        model=config.model.name,
        batch_size=config.batch_size,
        microbatch=config.microbatch,
        sharding=config.sharding,
        streamed=config.stream_inputs,
        pool=int(POOL_SHARE * TARGETS[cluster.target].memory),
        parts=_parts(program, name, stage),
        collectives=collectives,
        flops_per_sample=program.flops_per_sample,
        compile_seconds=seconds,
        notes=tuple(notes),
    )


def _parts(program: Program, name: str, stage: Stage) -> dict[str, int]:
    """What a GPU holds while `stage` runs, by purpose; activations are the rest."""
    config, state = program.config, program.abstract_state
    batches = 0 if name == "update" else 1 if name == "loss" else 2 if config.stream_inputs or config.prefetch else 1
    size = config.microbatch * program.mesh.size if config.stream_inputs else config.batch_size
    feature = program.local_batch * program.model.embed_dim * program.encoder.dtype.itemsize
    parts = {
        "parameters": device_bytes(state.params),
        "optimizer": device_bytes((state.opt_state, state.ema)),
        "inputs": batches * device_bytes(abstract_batch(program, size)),
        # Features of two towers, or their gradients; where the peak is the loss's own, all that is beside the rest.
        "features and loss": 0 if name == "update" else 2 * feature,
    }
    rest = stage.peak - sum(parts.values())
    return parts | (
        {"features and loss": 2 * feature + rest, "activations": 0} if name == "loss" else {"activations": rest}
    )
