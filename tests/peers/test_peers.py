"""Our imports and exports beside open_clip and transformers themselves, at random weights: make peers."""

import io
import json
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from disco_jax import convert
from disco_jax.data.images import decode_image, eval_transform
from disco_jax.data.tokenizer import load_tokenizer
from disco_jax.models import IMAGE_MEAN, IMAGE_STD
from disco_jax.training.initial import resize_image_positions
from disco_jax.training.metrics import read_history

open_clip = pytest.importorskip("open_clip", reason="make peers")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import save_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to mend

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = Path(__file__).parents[2] / "runs"
FILES = [GOLDEN / name for name in ("image_landscape_png.png", "image_grey_png.png", "image_tiny_png.png")]
TEXTS = ["a photo of a cat", "Two DOGS, running; in the park!", "naïve café — 1a2b3c", "word " * 100, "this &amp; that"]
NAMES = {"ViT-B-32": "gelu", "ViT-B-32-quickgelu": "quickgelu", "ViT-L-14": "gelu"}


def our_features(weights, pixels, tokens):
    clip = weights.clip()
    return np.asarray(clip.encode_image(jnp.asarray(pixels))), np.asarray(clip.encode_text(jnp.asarray(tokens)))


def assert_close(ours, theirs, tolerance=1e-4):
    for got, want in zip(ours, theirs, strict=True):
        want = want.detach().numpy()
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
        assert want.std(0).max() > 0.1 * np.abs(want).mean()  # different inputs, different features


@pytest.mark.parametrize("name", NAMES)
def test_open_clip_to_ours_to_open_clip_and_transformers(tmp_path, name):
    torch.manual_seed(0)
    original, _, preprocess = open_clip.create_model_and_transforms(name)
    original.eval()
    save_file(original.state_dict(), tmp_path / "original.safetensors")
    weights = convert.load(tmp_path / "original.safetensors", activation=NAMES[name])

    images = [Image.open(file).convert("RGB") for file in FILES]
    pixels = np.stack([eval_transform(decode_image(file.read_bytes()), 224) for file in FILES])
    normalised = (pixels / 255 - np.array(IMAGE_MEAN)) / np.array(IMAGE_STD)
    their_images = torch.stack([preprocess(image) for image in images])
    np.testing.assert_allclose(normalised.transpose(0, 3, 1, 2), their_images, atol=1e-5)
    tokens = load_tokenizer()(TEXTS, 77)
    their_tokens = open_clip.get_tokenizer(name)(TEXTS)
    np.testing.assert_array_equal(tokens, their_tokens)

    ours = our_features(weights, pixels, tokens)
    with torch.no_grad():
        theirs = original.encode_image(their_images), original.encode_text(their_tokens)
    assert_close(ours, theirs)

    convert.write(weights, tmp_path / "ours")
    out = convert.export(tmp_path / "ours", tmp_path / "out" / "exported.safetensors")[0]
    assert not out.with_suffix(".json").exists()
    again, _, _ = open_clip.create_model_and_transforms(name, pretrained=str(out))
    for key, value in original.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    with torch.no_grad():
        assert_close(ours, (again.eval().encode_image(their_images), again.encode_text(their_tokens)))

    (folder,) = convert.export(tmp_path / "ours", tmp_path / "hf", format="hf")
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    # By default it resizes with torchvision, which rounds otherwise than Pillow.
    processor = transformers.CLIPProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(text=TEXTS, images=images, return_tensors="pt", padding="max_length", truncation=True)
    # Of the tiny image it leaves out another pixel at the side, where the margin is odd.
    np.testing.assert_allclose(inputs["pixel_values"][:2], their_images[:2], atol=1e-5)
    # It fills up with ends of text instead of zeros, and does not resolve HTML, as the last text has it.
    first_end = (tokens == 49407).argmax(1)
    for row, end, theirs_row in list(zip(tokens, first_end, inputs["input_ids"].numpy(), strict=True))[:4]:
        np.testing.assert_array_equal(row[: end + 1], theirs_row[: end + 1])
    with torch.no_grad():
        outputs = model(input_ids=their_tokens, pixel_values=their_images)
    for got, want in zip(ours, (outputs.image_embeds, outputs.text_embeds), strict=True):
        got = got / np.linalg.norm(got, axis=-1, keepdims=True)
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want.numpy()).max())


def test_a_checkpoint_of_open_clip_as_a_pt_file(tmp_path):
    torch.manual_seed(0)
    original = open_clip.create_model("ViT-S-32-alt")
    held = {f"module.{name}": value for name, value in original.state_dict().items()}
    torch.save({"epoch": 3, "name": "run", "state_dict": held}, tmp_path / "epoch_3.pt")
    params = convert.load(tmp_path / "epoch_3.pt").params
    np.testing.assert_array_equal(params["visual"]["class_embedding"], original.visual.class_embedding.detach().numpy())
    torch.save({"state_dict": held, "code": object}, tmp_path / "pickled.pt")
    with pytest.raises(ValueError, match="more than tensors"):
        convert.load(tmp_path / "pickled.pt")
    torch.save({"weight": 3}, tmp_path / "number.pt")
    with pytest.raises(ValueError, match="'weight', which is no tensor"):
        convert.load(tmp_path / "number.pt")


@pytest.mark.parametrize(("old", "new"), [(7, 10), (16, 7), (7, 12)])
def test_image_positions_are_resized_as_open_clip_does(old, new):
    torch.manual_seed(0)
    positions = torch.randn(1 + old**2, 24)
    state = {"visual.positional_embedding": positions}

    class Model:
        class visual:  # noqa: N801
            positional_embedding = torch.empty(1 + new**2, 24)
            grid_size = (new, new)

    open_clip.model.resize_pos_embed(state, Model)
    ours = resize_image_positions(positions.numpy(), 1 + new**2)
    np.testing.assert_allclose(ours, state["visual.positional_embedding"], atol=1e-5)


def test_the_demo_scores_the_same_in_open_clip(tmp_path):
    from configs.demo import get_config

    run, data = RUNS / "demo" / "run", RUNS / "demo" / "data"
    assert (run / "checkpoints").is_dir(), "make demo first; make peers does"
    out = convert.export(run, tmp_path / "demo.safetensors")[0]
    open_clip.add_model_config(out.with_suffix(".json"))
    model, _, preprocess = open_clip.create_model_and_transforms("demo", pretrained=str(out))
    tokenizer = open_clip.get_tokenizer("demo")
    names = (data / "classes.txt").read_text().splitlines()
    images, labels = [], []
    for path in sorted(data.glob("held_out-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member).read()
                if member.name.endswith(".cls"):
                    labels.append(int(content))
                elif member.name.endswith(".png"):
                    images.append(preprocess(Image.open(io.BytesIO(content))))
    with torch.no_grad():
        classes = []
        for name in names:
            prompts = [template.replace("{}", name) for template in get_config().eval.templates]
            features = model.encode_text(tokenizer(prompts), normalize=True).mean(0)
            classes.append(features / features.norm())
        scores = model.encode_image(torch.stack(images), normalize=True) @ torch.stack(classes).T
    top1 = (scores.argmax(1) == torch.tensor(labels)).float().mean().item()
    measured = [row["eval/zero_shot/top1"] for row in read_history(run) if "eval/zero_shot/top1" in row][-1]
    print(json.dumps({"open_clip": top1, "ours": measured, "images": len(images)}))
    assert len(images) == len(labels) == 1000
    assert abs(top1 - measured) <= 0.005
    assert top1 > 0.7
