import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from golden_clip import abstract_clip, fast_jit, load, method
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from disco_jax.models import CLIP, IMAGE_MEAN, IMAGE_STD, CLIPConfig, TextConfig, VisionConfig, transformer

EOT = 98


@pytest.fixture(scope="module")
def golden():
    return load("open_clip_gelu")


def pixels(count: int, size: int = 32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8))


def token_row(*tokens: int, length: int = 13) -> jax.Array:
    return jnp.array([tokens + (0,) * (length - len(tokens))])


@pytest.mark.parametrize("name", ["open_clip_gelu", "open_clip_quickgelu"])
def test_features_equal_open_clip(name):
    config, params, arrays = load(name)
    images = jnp.asarray(arrays["images_nchw"].transpose(0, 2, 3, 1))
    image_features = method(config, "visual")(params, images)
    text_features = method(config, "encode_text")(params, jnp.asarray(arrays["tokens"], jnp.int32))
    for got, want in ((image_features, arrays["image_features"]), (text_features, arrays["text_features"])):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
        assert np.linalg.norm(got - want) < 2e-6 * np.linalg.norm(want)


def test_encode_image_normalises(golden):
    config, params, _ = golden
    images = pixels(3)
    normalised = (np.asarray(images, np.float64) / 255 - IMAGE_MEAN) / IMAGE_STD
    want = method(config, "visual")(params, jnp.asarray(normalised, jnp.float32))
    np.testing.assert_allclose(method(config, "encode_image")(params, images), want, rtol=1e-4, atol=1e-5)


def test_text_is_causal_and_pooled_at_the_first_end(golden):
    config, params, _ = golden
    encode = method(config, "encode_text")
    same = [token_row(97, 5, 6, EOT), token_row(97, 5, 6, EOT, 7, 8), token_row(97, 5, 6, EOT, 7, EOT)]
    other = [token_row(97, 9, 6, EOT), token_row(97, 6, 5, EOT), token_row(97, 5, 6, 7, EOT)]
    features = np.asarray(encode(params, jnp.concatenate(same)))
    np.testing.assert_array_equal(features[1:], features[:1].repeat(2, 0))
    assert (np.abs(np.asarray(encode(params, jnp.concatenate(other))) - features[0]).max(1) > 1e-2).all()
    cut = encode(params, same[0][:, :4])
    np.testing.assert_allclose(cut[0], features[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["encode_image", "encode_text"])
def test_bfloat16_is_close(golden, name):
    config, params, arrays = golden
    inputs = pixels(3) if name == "encode_image" else jnp.asarray(arrays["tokens"], jnp.int32)
    half, full = (method(config, name, dtype)(params, inputs) for dtype in (jnp.bfloat16, jnp.float32))
    assert (half.dtype, full.dtype) == (jnp.bfloat16, jnp.float32)
    half, full = np.asarray(half, np.float32), np.asarray(full)
    assert 1e-4 < np.linalg.norm(half - full) / np.linalg.norm(full) < 0.02


def test_works_without_jit_on_host_arrays(golden, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # signatures say jax.Array
    config, params, arrays = golden
    model = nnx.merge(abstract_clip(config)[0], params)
    np.testing.assert_allclose(model.encode_text(arrays["tokens"]), arrays["text_features"], rtol=1e-4, atol=1e-5)
    assert model.encode_image(np.asarray(pixels(3))).shape == (3, 24)


def test_gradients_reach_every_parameter(golden):
    config, params, arrays = golden
    graphdef = abstract_clip(config, jnp.bfloat16)[0]

    def loss(params, images, tokens):
        model = nnx.merge(graphdef, params)
        logits = model.encode_image(images) @ model.encode_text(tokens).T
        return -jnp.trace(jax.nn.log_softmax(jnp.exp(model.logit_scale[...]) * logits.astype(jnp.float32)))

    grads = fast_jit(jax.grad(loss))(params, pixels(3), jnp.asarray(arrays["tokens"], jnp.int32))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert grad.dtype == jnp.float32, path
        assert np.isfinite(grad).all(), path
        assert np.any(grad), path


def test_only_parameters_in_the_state_and_blocks_are_stacked(golden):
    config, params, _ = golden
    _, only_params, rest = nnx.split(nnx.merge(abstract_clip(config)[0], params), nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    for tower, layers in (("visual", config.vision.layers), ("text", config.text.layers)):
        for leaf in jax.tree.leaves(only_params[tower]["transformer"]["blocks"]):
            assert leaf.shape[0] == layers


def test_encoders_need_no_collectives(golden):
    config, params, _ = golden
    graphdef = abstract_clip(config)[0]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    inputs = {"encode_image": pixels(8), "encode_text": jnp.tile(token_row(97, 5, EOT), (8, 1))}
    for name, batch in inputs.items():
        encode = fast_jit(lambda p, x, name=name: getattr(nnx.merge(graphdef, p), name)(x), in_shardings=shardings)
        program = encode.lower(params, batch).compile()
        assert program.output_shardings.spec == P("data")
        assert not any(op in program.as_text() for op in ("all-gather", "all-reduce", "all-to-all", "permute"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.encode_image(pixels(1, 40)), ["(1, 40, 40, 3)", "(b, 32, 32, 3)", "eval_transform(image, 32)"]),
        (lambda m: m.encode_image(pixels(1)[:, :28]), ["(1, 28, 32, 3)", "(b, 32, 32, 3)"]),
        (lambda m: m.encode_image(pixels(1)[0]), ["(32, 32, 3)", "(b, 32, 32, 3)"]),
        (lambda m: m.visual(pixels(1, 34).astype(jnp.float32)), ["(1, 34, 34, 3)", "(b, 32, 32, 3)"]),
        (lambda m: m.encode_image(pixels(1).astype(jnp.float32)), ["uint8", "got float32", "clip.visual"]),
        (lambda m: m.encode_text(token_row(97, EOT, length=14)), ["(1, 14)", "L <= 13", "context_length=13"]),
        (lambda m: m.encode_text(token_row(97, EOT)[0]), ["(13,)", "(b, L)"]),
    ],
)
def test_wrong_input(golden, call, words, monkeypatch):
    config, params, _ = golden
    model = nnx.merge(abstract_clip(config)[0], params)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users: the model's own checks
    with pytest.raises(ValueError) as error:
        call(model)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_initialisation():
    vision = VisionConfig(image_size=32, patch_size=4, width=64, layers=4, heads=2, mlp_width=256)
    text = TextConfig(width=48, layers=3, heads=2, mlp_width=192, context_length=32, vocab_size=500, eot_id=499)
    config = CLIPConfig(32, vision, text)
    init = fast_jit(lambda key: nnx.state(CLIP(config, rngs=nnx.Rngs(key))))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(init(jax.random.key(1))))
    visual, language = params["visual"], params["text"]
    normal, uniform = [], []  # (values, standard deviation), (values, bound)
    normal += [(visual[name], 64**-0.5) for name in ("class_embedding", "position_embedding")]
    normal += [(visual["projection"]["kernel"], 64**-0.5), (language["projection"]["kernel"], 48**-0.5)]
    normal += [(language["token_embedding"]["embedding"], 0.02), (language["position_embedding"], 0.01)]
    uniform += [(visual["patch_embedding"]["kernel"], 48**-0.5)]
    blocks = visual["transformer"]["blocks"]
    uniform += [(blocks["attn"]["in_proj"]["kernel"], math.sqrt(6 / (64 + 192)))]
    uniform += [(blocks["attn"]["out_proj"]["kernel"], 64**-0.5)]
    uniform += [(blocks["mlp"]["c_fc"]["kernel"], 64**-0.5), (blocks["mlp"]["c_proj"]["kernel"], 256**-0.5)]
    uniform += [(blocks["mlp"]["c_fc"]["bias"], 64**-0.5), (blocks["mlp"]["c_proj"]["bias"], 256**-0.5)]
    blocks = language["transformer"]["blocks"]
    normal += [(blocks["attn"]["in_proj"]["kernel"], 48**-0.5), (blocks["mlp"]["c_fc"]["kernel"], 96**-0.5)]
    normal += [(blocks["attn"]["out_proj"]["kernel"], 48**-0.5 * 6**-0.5)]
    normal += [(blocks["mlp"]["c_proj"]["kernel"], 48**-0.5 * 6**-0.5)]
    uniform += [(blocks["mlp"]["c_fc"]["bias"], 48**-0.5), (blocks["mlp"]["c_proj"]["bias"], 192**-0.5)]
    for values, std in normal + [(values, bound / math.sqrt(3)) for values, bound in uniform]:
        assert abs(values.mean()) < 4 * std / math.sqrt(values.size)
        assert abs(values.std() / std - 1) < 4 / math.sqrt(2 * values.size)
    for values, bound in uniform:
        assert bound * (1 - 10 / values.size) < np.abs(values).max() <= bound
    for tower in (visual, language):
        blocks = tower["transformer"]["blocks"]
        for linear in (blocks["attn"]["in_proj"], blocks["attn"]["out_proj"]):
            assert not linear["bias"].any()
            assert not (linear["kernel"][0] == linear["kernel"][1]).any()
        for norm in (blocks["ln_1"], blocks["ln_2"], *(v for k, v in tower.items() if k.startswith("ln_"))):
            assert (norm["scale"] == 1).all()
            assert not norm["bias"].any()
    assert params["logit_scale"] == jnp.float32(math.log(1 / 0.07))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("causal", [False, True])
def test_odd_lengths_are_padded_for_cudnn(monkeypatch, causal):
    """jax's cuDNN attention has gradients for even lengths alone; the other implementation stands for it here."""
    original, seen = jax.nn.dot_product_attention, []

    def instead(q, k, v, **kwargs):
        seen.append((q.shape[1], kwargs.pop("implementation")))
        return original(q, k, v, **kwargs)

    def attention(implementation):
        monkeypatch.setattr(transformer, "attention_implementation", lambda *_: implementation)
        init = transformer.KernelInit(*[transformer.torch_default] * 4)
        return transformer.Attention(
            16, 2, causal=causal, kernel_init=init, dtype=jnp.float32, attention="auto", rngs=nnx.Rngs(0)
        )

    x = jax.random.normal(jax.random.key(0), (3, 7, 16))
    xla, cudnn = attention("xla"), attention("cudnn")
    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    for run in (lambda layer, x: layer(x), lambda layer, x: jax.grad(lambda x: (layer(x) ** 2).sum())(x)):
        np.testing.assert_allclose(run(cudnn, x), run(xla, x), rtol=1e-5, atol=1e-6)
    assert set(seen) == {(8, "cudnn"), (7, "xla")}


def test_automatic_attention_is_xla_where_cudnn_does_not_work(monkeypatch):
    def on(platform, capability):
        device = SimpleNamespace(platform=platform, device_kind="a device", compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda: [device])

    choose = transformer.attention_implementation
    on("gpu", "8.0")
    assert choose("auto", jnp.bfloat16, 64) == "cudnn" and choose("xla", jnp.bfloat16, 64) == "xla"
    assert choose("auto", jnp.float32, 64) == choose("auto", jnp.bfloat16, 132) == "xla"
    on("gpu", "7.5")
    assert choose("auto", jnp.bfloat16, 64) == "xla"
    on("cpu", None)
    assert choose("auto", jnp.bfloat16, 64) == "xla"
    for dtype, width, message in (
        (jnp.bfloat16, 64, "needs NVIDIA GPUs.*a device"),
        (jnp.float32, 64, "computes in bfloat16"),
        (jnp.bfloat16, 136, "head width up to 128 in steps of 8, not 136"),
    ):
        with pytest.raises(ValueError, match=message):
            transformer.check_cudnn(dtype, width)


def test_gradient_of_gelu_is_its_derivative_on_devices_too():
    x = np.linspace(-9, 9, 400)  # float64
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    rows = P("rows")
    derivative = jax.grad(lambda x: transformer.gelu(x).sum())
    with jax.enable_x64(True):
        expected = jax.vmap(jax.grad(lambda x: jax.nn.gelu(x, approximate=False)))(x)
        found = jax.jit(jax.shard_map(derivative, mesh=mesh, in_specs=rows, out_specs=rows))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)
    assert derivative(jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16
