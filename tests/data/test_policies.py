"""Against tf-models-official's own operations at fixed levels, and the policies' tables by counting."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from vit_tpu.data import keys, policies
from vit_tpu.errors import UserError

SIZE = (26, 30)


@pytest.fixture(scope="module")
def official():
    from official.vision.ops import augment

    return augment


@pytest.fixture(scope="module")
def picture():
    coarse = np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(SIZE[::-1], Image.Resampling.BICUBIC), np.int32)
    return tf.constant(np.clip(smooth // 2 + 40, 0, 255).astype(np.uint8))


def _key_with(sign):
    """A key whose step draws this sign."""
    for number in range(50):
        draws = policies.Draws(keys.make_key(0, number), tf.constant(1000))
        if float(draws.sign()) == sign:
            return draws
    raise AssertionError


@pytest.mark.parametrize("op", [o for o in policies.RANDAUGMENT_OPERATIONS if o not in ("Cutout", "Identity")])
def test_each_operation_is_the_official_one(op, official, picture, monkeypatch):
    results = []
    for level, sign in ((3.0, 1.0), (9.0, -1.0)):
        monkeypatch.setattr(official, "_randomly_negate_tensor", lambda value, sign=sign: sign * value)
        side = SIZE[1] if op == "TranslateX" else SIZE[0]
        arguments = official.level_to_arg(40.0, policies.TRANSLATE * side)[op](level)
        if op in official.REPLACE_FUNCS:
            arguments = (*arguments, [128] * 3)
        expected = official.NAME_TO_FUNC[op](picture, *arguments)
        found = policies._operation(op)(policies._argument(op, level, SIZE), picture, _key_with(sign))
        assert found.dtype == tf.uint8
        np.testing.assert_array_equal(found, expected)
        results.append(found.numpy())
    if op not in ("AutoContrast", "Equalize", "Invert"):
        assert not np.array_equal(*results), "the level has no effect"


def test_cutout_is_the_official_one_at_the_same_place(official, picture):
    for row, column in ((0.0, 0.0), (0.5, 0.5), (0.99, 0.3)):
        expected = official._fill_rectangle(picture, int(column * SIZE[1]), int(row * SIZE[0]), 4, 4, 128)
        np.testing.assert_array_equal(policies.cutout(picture, 4, tf.constant(row), tf.constant(column)), expected)


def test_solarize_at_the_highest_level_changes_nothing(picture):
    for level in (10.0, 20.0):
        found = policies._operation("Solarize")(policies._argument("Solarize", level, SIZE), picture, _key_with(1.0))
        np.testing.assert_array_equal(found, picture)


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_blur_is_a_gaussian(sigma, picture):
    from scipy.ndimage import gaussian_filter

    expected = gaussian_filter(picture.numpy().astype(np.float64), (sigma, sigma, 0), mode="nearest", radius=6)
    found = policies.blur(picture, tf.constant(sigma)).numpy()
    assert np.abs(found - expected).max() <= 0.51


def _counted(monkeypatch, name, count, **options):
    """How often each sequence of (operation, argument) is played in `count` draws; images hold the history."""
    names = []

    def operation(op):
        def record(argument, image, draws):
            names.append((op, argument))
            return tf.concat(
                [image[:, 1:], tf.fill([1, 1, image.shape[-1]], tf.constant(len(names), tf.uint8))], axis=1
            )

        return record

    monkeypatch.setattr(policies, "_operation", operation)
    distort = policies.make_policy(name, (1, 4), **options)
    dataset = tf.data.Dataset.range(count).map(lambda i: distort(tf.zeros([1, 4, 3], tf.uint8), keys.make_key(3, i)))
    found: dict = {}
    for image in dataset.as_numpy_iterator():
        history = tuple(names[number - 1] for number in image[0, :, 0] if number)
        found[history] = found.get(history, 0) + 1
    return found


def test_randaugment_draws_every_operation_equally_often_in_each_layer(monkeypatch):
    found = _counted(monkeypatch, "randaugment", 3400, layers=2, magnitude=7.0)
    for layer in range(2):
        counts = {}
        for history, times in found.items():
            counts[history[layer][0]] = counts.get(history[layer][0], 0) + times
        assert set(counts) == set(policies.RANDAUGMENT_OPERATIONS)
        # chi squared with 16 degrees of freedom: above 39.3 once in a thousand
        assert sum((c - 200) ** 2 / 200 for c in counts.values()) < 39.3
    # The layers are independent: a repeated operation is as frequent as chance has it.
    assert abs(sum(t for h, t in found.items() if h[0] == h[1]) - 200) < 50


def test_autoaugment_plays_the_pairs_of_the_table_as_often_as_it_says(monkeypatch, official):
    count = 4000
    found = _counted(monkeypatch, "autoaugment", count)
    expected: dict = {}
    for (a, p, m), (b, q, n) in official.AutoAugment.policy_v0():
        one = (a, policies._argument(a, m, (1, 4)))
        two = (b, policies._argument(b, n, (1, 4)))
        for history, share in (
            ((one, two), p * q),
            ((one,), p * (1 - q)),
            ((two,), (1 - p) * q),
            ((), (1 - p) * (1 - q)),
        ):
            expected[history] = expected.get(history, 0) + share * count / 25
    assert set(found) <= {history for history, times in expected.items() if times}
    often = [(found.get(h, 0), times) for h, times in expected.items() if times > 5]
    assert len(often) > 45
    assert max(abs(f - times) / times**0.5 for f, times in often) < 4.2
    assert abs(found[()] - expected[()]) < 3 * expected[()] ** 0.5


def test_three_augment_is_grey_solarize_or_blur(monkeypatch):
    found = _counted(monkeypatch, "three_augment", 900)
    assert set(found) == {(("Grayscale", 0.0),), (("Solarize", 128),), (("Blur", 0.0),)}
    assert all(abs(times - 300) < 60 for times in found.values())


def test_a_policy_is_a_function_of_the_key(picture):
    distort = tf.function(policies.make_policy("three_augment", SIZE), autograph=False)
    tf.random.set_seed(1)
    first = [distort(picture, keys.make_key(0, i)).numpy() for i in range(9)]
    tf.random.set_seed(2)
    again = [distort(picture, keys.make_key(0, i)).numpy() for i in range(9)]
    np.testing.assert_array_equal(first, again)
    assert len({image.tobytes() for image in first}) > 3  # blurs of different widths among them
    assert first[0].dtype == np.uint8


def test_grey_images_stay_grey():
    distort = policies.make_policy("three_augment", (8, 8))
    image = tf.reshape(tf.cast(tf.range(64), tf.uint8), [8, 8, 1])
    assert distort(image, keys.make_key(0, 1)).shape == (8, 8, 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("randaugmnt",), 'policy is "randaugmnt".*did you mean "randaugment"'),
        (("randaugment", 0), "0 layers"),
        (("randaugment", 2, -1.0), "magnitude -1"),
    ],
)
def test_wrong_policies_are_one_line_of_error(arguments, message):
    with pytest.raises(UserError, match=message):
        policies.make_policy(arguments[0], SIZE, *arguments[1:])
