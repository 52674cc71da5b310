"""make demo

Trains a tiny CLIP on generated scenes, on 8 simulated CPU devices, in a few minutes; then names colours and shapes
that it never saw together. Without make:

    python -m disco_jax.data.scenes runs/demo/data
    python train.py --config configs/demo.py --workdir runs/demo/run
"""

from ml_collections import ConfigDict

from disco_jax.data.scenes import PLACES, SIZES
from disco_jax.training import default_config


def get_config() -> ConfigDict:
    """The demo's settings."""
    config = default_config()
    config.cpu_devices = 8
    config.mesh = (("rows", 8),)
    config.batch_size = 128
    config.total_steps = 400

    config.model.name = "tiny"
    config.model.dtype = "float32"
    config.model.context_length = 24

    config.data.train = "runs/demo/data/train-*.tar"
    config.data.eval = "runs/demo/data/held_out-*.tar"
    config.data.label = "cls"
    config.data.threads = 2

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 50
    config.optimizer.grad_clip = 1.0

    config.eval.every_steps = 100
    config.eval.batch_size = 256
    config.eval.classes = "runs/demo/data/classes.txt"
    config.eval.templates = tuple(f"a {size} {{}} {place}" for size in SIZES for place in PLACES)

    config.checkpoint.every_steps = 100
    config.checkpoint.best_metric = "eval/zero_shot/top1"
    config.log.every_steps = 10
    return config
