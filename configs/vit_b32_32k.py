"""python train.py --config configs/vit_b32_32k.py --workdir runs/vit_b32_32k \
    --config.data.train='laion400m/{00000..41407}.tar' --config.data.eval='coco/{00000..00004}.tar'

ViT-B/32 at batch 32,768 on one host of 8 GPUs: OpenAI's recipe, 32 epochs of LAION-400M. Planned for A100-40GB on
2026-12-01: 14.0 of 36.3 GiB.
"""

from ml_collections import ConfigDict

from disco_jax.training import default_config


def get_config() -> ConfigDict:
    """OpenAI's recipe at its batch size."""
    config = default_config()
    config.batch_size = 32_768
    config.microbatch = 1024
    config.total_steps = 32 * 400_000_000 // config.batch_size
    config.model.name = "ViT-B-32"
    config.model.remat = "dots"
    config.data.threads = 64
    config.eval.every_steps = 5_000
    config.eval.batch_size = 4_096
    return config
