"""python train.py --config configs/vit_b32_4m.py --workdir runs/vit_b32_4m \
    --config.data.train='datacomp/{00000..12895}.tar' --config.data.eval='coco/{00000..00004}.tar'

ViT-B/32 at batch 4,194,304 on one host of 8 GPUs. The images of a step, 631 GB, stay in the host's memory and go to the
GPUs by microbatches, twice. The host's memory holds up to three batches (see vit_b32_1m.py): that takes 1.9 TB, or
several hosts. Planned for A100-40GB on 2026-12-01: 8.77 of 36.3 GiB.
"""

from ml_collections import ConfigDict

from configs import vit_b32_1m


def get_config() -> ConfigDict:
    """As at 1,048,576, streamed."""
    config = vit_b32_1m.get_config()
    config.batch_size = 4_194_304
    config.stream_inputs = True
    config.total_steps = 12_800_000_000 // config.batch_size
    config.optimizer.warmup_steps = 200
    config.eval.every_steps = 200
    config.checkpoint.every_steps = 100
    return config
