"""The source that a config's data settings name."""

from ml_collections import ConfigDict

from disco_jax.data.examples import ExampleSource
from disco_jax.data.scenes import Scenes
from disco_jax.data.shards import TarSource


def make_source(data: ConfigDict, split: str, *, labelled: bool) -> ExampleSource:
    """Opens a split of the data.

    Args:
        data: `config.data` of `disco_jax.training.default_config`.
        split: `data.train` or `data.eval`: a shard pattern for tars, a split's name otherwise.
        labelled: whether tars must give the class indices that `data.label` names.

    Raises:
        FileNotFoundError, ValueError, ImportError: as the source does, in one line with the cure.
    """
    if data.source == "tars":
        return TarSource(
            split, caption=data.caption, label=data.label if labelled else None, cache_dir=data.index_cache
        )
    if data.source == "scenes":
        return Scenes(split)
    from disco_jax.data.tfds_source import TfdsSource  # an extra

    return TfdsSource(
        data.tfds_name,
        split,
        data_dir=data.tfds_dir,
        image_key=data.tfds_image_key,
        text_key=data.tfds_text_key,
        label_key=data.tfds_label_key,
        prompt=data.tfds_prompt,
    )
