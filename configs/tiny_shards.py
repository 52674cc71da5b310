"""python train.py --config configs/tiny_shards.py --workdir runs/tiny \
    --config.data.train='shards/{00000..00009}.tar' --config.data.eval='shards/00010.tar'

A tiny CLIP for one CPU on any image-text tars; for trying out data. Evaluates on training pairs too.
"""

from ml_collections import ConfigDict

from disco_jax.training import default_config


def get_config() -> ConfigDict:
    """Settings for a few thousand pairs and a CPU."""
    config = default_config()
    config.mesh = (("rows", 1),)
    config.batch_size = 128
    config.total_steps = 1000

    config.model.name = "tiny"
    config.model.dtype = "float32"
    config.model.context_length = 32
    config.data.threads = 4

    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.grad_clip = 1.0

    config.eval.every_steps = 250
    config.eval.batch_size = 128
    config.eval.train_examples = 2000
    config.checkpoint.every_steps = 250
    return config
