"""python train.py --config configs/vit_b32_1m.py --workdir runs/vit_b32_1m \
    --config.data.train='datacomp/{00000..12895}.tar' --config.data.eval='coco/{00000..00004}.tar'

ViT-B/32 at batch 1,048,576 on one host of 8 GPUs: each holds the images of its 131,072 pairs (18.4 GiB), and not those
of the next step. The host's memory holds up to three batches of 158 GB: one that is put together, its pieces, and what
is read ahead. Planned for A100-40GB on 2026-12-01: 26.1 of 36.3 GiB.
"""

from ml_collections import ConfigDict

from configs import vit_b32_32k


def get_config() -> ConfigDict:
    """One step sees what OpenAI's saw in 32; the learning rate is not raised with the batch beyond 1e-3."""
    config = vit_b32_32k.get_config()
    config.batch_size = 1_048_576
    config.microbatch = 512
    config.prefetch = False
    config.total_steps = 12_800_000_000 // config.batch_size
    config.optimizer.learning_rate = 1e-3
    config.optimizer.beta2 = 0.95
    config.optimizer.warmup_steps = 500
    config.eval.every_steps = 500
    return config
