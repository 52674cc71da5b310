"""Tasks on data of a prime size, with bad examples, several captions or none: the same numbers on 1 and 8 devices."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_model import encoded, evaluator

from disco_jax.data.examples import BadExample
from disco_jax.data.scenes import CLASS_NAMES, Scenes, write_scenes
from disco_jax.data.shards import write_tar
from disco_jax.evaluation.prompts import Prompts, make_prompts
from disco_jax.evaluation.tasks import TASKS, Destination, Task, eval_task, open_task, run_task

SIZE = 13
DESTINATION = Destination(Path("unused"), {})


class Changed:
    """Scenes, some of them changed: by index, the fields of the example, or the error to raise."""

    def __init__(self, changes, size=SIZE):
        self.scenes, self.changes = Scenes("held_out", size), changes

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        change = self.changes.get(index, {})
        if isinstance(change, Exception):
            raise change
        return replace(self.scenes[index], **change)


def outcomes(task):
    """On 1 and on 8 devices."""
    return [run_task(task, *evaluator(devices), DESTINATION) for devices in (1, 8)]


def scores(queries, candidates):
    queries, candidates = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, candidates))
    return queries @ candidates.T


def ranks(scores, right):
    """The place of each row's first right candidate, from 1."""
    return 1 + np.argmax(np.take_along_axis(right, np.argsort(-scores, axis=1), axis=1), axis=1)


def test_retrieval_counts_every_caption_and_every_image_once():
    changes = {
        0: {"image": b""},
        1: {"other_captions": ("two", b"three")},
        2: {"caption": b"\xff", "other_captions": ("a", " ")},  # one good one is left
        5: {"caption": None},
        6: BadExample("shard:truncated", "cut off"),
        12: {"other_captions": ("last",)},
    }
    source = Changed(changes)
    one, eight = outcomes(Task("pictures", eval_task("retrieval"), source, None))
    assert one == eight
    assert (one.examples, one.dropped, one.dropped_captions) == (10, 3, 2)

    good = [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]
    texts = [(row, source[i].caption) for row, i in enumerate(good) if i != 2]
    texts += [(0, "two"), (0, "three"), (1, "a"), (9, "last")]
    preprocessor = evaluator(1)[0].preprocessor
    images = encoded(preprocessor, images=[source[i] for i in good])
    found = scores(images, encoded(preprocessor, texts=[text for _, text in texts]))
    right = np.arange(len(good))[:, None] == [row for row, _ in texts]
    for way, by_query in (("image_to_text", ranks(found, right)), ("text_to_image", ranks(found.T, right.T))):
        assert one.metrics[f"{way}/R@1"] == pytest.approx((by_query == 1).mean())
        assert one.metrics[f"{way}/R@5"] == pytest.approx((by_query <= 5).mean())
        assert one.metrics[f"{way}/median_rank"] == np.median(by_query)


def test_zero_shot_needs_no_captions_and_counts_images_with_a_label():
    prompts = Prompts(CLASS_NAMES, ("a {}", "a large {} on the left"))
    changes = {i: {"caption": None} for i in range(SIZE)} | {3: {"label": None}, 4: {"image": b"x"}}
    source = Changed(changes)
    one, eight = outcomes(Task("names", eval_task("zero-shot"), source, prompts))
    assert one == eight
    assert (one.examples, one.dropped) == (11, 2)

    good = [i for i in range(SIZE) if i not in (3, 4)]
    preprocessor = evaluator(1)[0].preprocessor
    texts = [template.replace("{}", name) for name in CLASS_NAMES for template in prompts.templates]
    of_prompts = encoded(preprocessor, texts=texts)
    of_prompts = of_prompts / np.linalg.norm(of_prompts, axis=1, keepdims=True)
    classes = of_prompts.reshape(len(CLASS_NAMES), 2, -1).mean(axis=1)
    found = scores(encoded(preprocessor, images=[source[i] for i in good]), classes)
    labels = np.array([source[i].label for i in good])
    by_image = ranks(found, labels[:, None] == np.arange(len(CLASS_NAMES)))
    assert one.metrics["top1"] == pytest.approx((by_image == 1).mean())
    assert one.metrics["top5"] == pytest.approx((by_image <= 5).mean())
    recalls = [(by_image[labels == label] == 1).mean() for label in np.unique(labels)]
    assert one.metrics["mean_per_class_recall"] == pytest.approx(np.mean(recalls))


def test_data_without_a_usable_example_or_label_are_refused():
    with pytest.raises(ValueError, match="not one usable example in the evaluation data"):
        run_task(Task("x", eval_task("retrieval"), Changed({0: {"caption": ""}}, 1), None), *evaluator(1), DESTINATION)
    task = Task("x", eval_task("zero-shot"), Changed({0: {"label": None}}, 1), Prompts(("a", "b"), ("{}",)))
    with pytest.raises(ValueError, match="not one usable example has a label"):
        run_task(task, *evaluator(1), DESTINATION)


def test_a_task_opens_its_data_as_they_are(tmp_path):
    write_scenes(tmp_path, {"held_out": 5})
    classes, templates = tmp_path / "classes.txt", tmp_path / "templates.txt"
    templates.write_text("a {}\nthe {}.\n")
    settings = eval_task(
        "zero-shot",
        split=f"{tmp_path}/held_out-*.tar",
        classes=str(classes),
        templates=str(templates),
        index_cache=str(tmp_path / "index"),
    )
    task = open_task("names", settings)
    assert task.prompts == Prompts(CLASS_NAMES, ("a {}", "the {}."))
    assert task.source[0].caption is None and task.source[0].label is not None

    settings = eval_task("embed", split=f"{tmp_path}/held_out-*.tar", index_cache=str(tmp_path / "index"))
    assert open_task("e", settings).source[0].caption is not None
    settings.caption = None
    assert open_task("e", settings).source[0].caption is None

    known = open_task("scenes", eval_task("zero-shot", source="scenes", split="held_out"))
    assert known.prompts == Prompts(CLASS_NAMES, ("a photo of a {}.",))


def test_settings_have_the_names_and_types_of_their_task():
    assert set(TASKS) == {"zero-shot", "retrieval", "embed"}
    assert eval_task("zero-shot").label == "cls"
    assert eval_task("embed", part_size=7, every_steps=3).part_size == 7
    with pytest.raises(ValueError, match="unknown task 'zeroshot': use one of zero-shot, retrieval, embed"):
        eval_task("zeroshot")
    with pytest.raises(KeyError, match="classes"):
        eval_task("retrieval", classes="names.txt")
    with pytest.raises(TypeError, match="every_steps"):
        eval_task("embed", every_steps="often")


WRONG = {
    "source": ("retrieval", {"source": "tar"}, "source='tar' is unknown: use one of tars"),
    "split": ("retrieval", {"split": ""}, "split is empty"),
    "tfds": ("zero-shot", {"source": "tfds"}, "tfds_name is not set"),
    "steps": ("retrieval", {"every_steps": -1}, "every_steps=-1 must be at least 0"),
    "part": ("embed", {"part_size": 0}, "part_size=0 must be at least 1"),
    "label": ("zero-shot", {"label": None}, "label is not set: give 'cls'"),
    "no label there": ("zero-shot", {"split": "{folder}/bare.tar"}, "holds no sample with an image and .cls"),
    "no names": ("zero-shot", {}, "classes is not set, and the data do not name"),
    "few names": ("zero-shot", {"classes": "{folder}/two.txt"}, "has the label .*, and there are 2 class names"),
    "other number": (
        "zero-shot",
        {"source": "scenes", "split": "held_out", "classes": "{folder}/two.txt"},
        r"two\.txt names 2 classes, the data have 20",
    ),
    "no file": ("zero-shot", {"classes": "nowhere.txt"}, r"classes=nowhere\.txt does not exist"),
    "no templates": ("zero-shot", {"templates": "nowhere.txt"}, r"templates=nowhere\.txt does not exist"),
    "no {}": ("zero-shot", {"templates": ("a photo",)}, r"templates: 'a photo' has no \{\}"),
    "empty": ("zero-shot", {"templates": ()}, "templates is empty"),
    "no captions": ("retrieval", {"split": "{folder}/bare.tar"}, "holds no sample with an image and .txt"),
    "folder": ("retrieval", {"source": "folder", "split": "{folder}/images"}, "the data have no captions"),
    "unlabelled": (
        "zero-shot",
        {"source": "scenes", "split": "train", "classes": "{folder}/two.txt"},
        "the data have no class indices",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_evaluated_is_told_before_any_work(tmp_path, name):
    kind, changes, message = WRONG[name]
    write_scenes(tmp_path, {"held_out": 5})
    write_tar(tmp_path / "bare.tar", [replace(Scenes("held_out")[0], caption=None, label=None)])
    (tmp_path / "two.txt").write_text("red\nblue\n")
    (tmp_path / "images" / "red").mkdir(parents=True)
    (tmp_path / "images" / "red" / "0.png").write_bytes(Scenes("held_out")[0].image)
    settings = {"split": "{folder}/held_out-*.tar", "index_cache": "{folder}/index"}
    if kind == "zero-shot" and name != "no names":
        settings["classes"] = "{folder}/classes.txt"
    settings = {
        key: value.replace("{folder}", str(tmp_path)) if isinstance(value, str) else value
        for key, value in (settings | changes).items()
    }
    with pytest.raises((ValueError, OSError), match=message) as error:
        open_task("x", eval_task(kind, **settings))
    assert "\n" not in str(error.value)


def test_class_files_may_begin_with_a_mark_and_end_in_blank_lines(tmp_path):
    (tmp_path / "names.txt").write_text("\ufeffred ring\nblue ring \n\n", encoding="utf-8")
    assert make_prompts(Scenes("train", 1), str(tmp_path / "names.txt"), ("{}",)).names == ("red ring", "blue ring")
    (tmp_path / "names.txt").write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"names\.txt is not UTF-8"):
        make_prompts(Scenes("train", 1), str(tmp_path / "names.txt"), ("{}",))
