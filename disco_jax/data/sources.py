"""The source that a config's data settings name."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from disco_jax.data.examples import ExampleSource
from disco_jax.data.folders import FolderSource
from disco_jax.data.scenes import Scenes
from disco_jax.data.shards import TarSource

SOURCES = ("tars", "tfds", "scenes", "folder")


def source_settings() -> ConfigDict:
    """The settings that say where examples are, with their defaults; `make_source` reads these and no others."""
    settings = ConfigDict()
    settings.source = "tars"  # "tars", "tfds", "scenes" (generated), or "folder": of class folders, without captions
    # tars: the member with the caption, "txt:lines" where each line is one, or "json:FIELD" with a text or a list
    settings.caption = "txt"
    settings.label = placeholder(str)  # tars: "cls" or "json:FIELD", where there are class indices
    settings.index_cache = placeholder(str)  # tars: folder of the indices; unset: the user's cache folder
    settings.tfds_name = placeholder(str)  # tfds: "name:version", or the folder of a prepared dataset
    settings.tfds_dir = placeholder(str)  # tfds: where datasets are prepared
    settings.tfds_image_key = "image"
    settings.tfds_text_key = placeholder(str)  # either a text feature, or a list's, such as "captions/text" ...
    settings.tfds_label_key = placeholder(str)  # ... or a label, put into the prompt
    settings.tfds_prompt = "a photo of a {}."
    return settings


def make_source(data: ConfigDict, split: str, *, labelled: bool, captioned: bool = True) -> ExampleSource:
    """Opens a split of the data.

    Args:
        data: holds the `source_settings`, as `config.data` of `disco_jax.training.default_config` does.
        split: `data.train` or `data.eval`, for instance: a shard pattern for tars, the folder of class folders, else a
            split's name.
        labelled: whether tars must give the class indices that `data.label` names.
        captioned: whether tars must give captions.

    Raises:
        FileNotFoundError, ValueError, ImportError: as the source does, in one line with the cure.
    """
    if data.source == "tars":
        return TarSource(
            split,
            caption=data.caption if captioned else None,
            label=data.label if labelled else None,
            cache_dir=data.index_cache,
        )
    if data.source == "folder":
        return FolderSource(split)
    if data.source == "scenes":
        return Scenes(split)
    if data.source != "tfds":
        raise ValueError(f"source {data.source!r} is unknown: use one of {', '.join(SOURCES)}")
    if data.tfds_name is None:
        raise ValueError("tfds_name is not set: give 'name:version' or the folder of a prepared dataset")
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
