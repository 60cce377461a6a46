"""Evaluation of a model: equal to a direct computation, every example once, whatever the batch and the replicas."""

import numpy as np
import pytest
import tensorflow as tf
import trained_runs

import vit_tpu
from vit_tpu.data.arrays import from_arrays
from vit_tpu.data.digits import digits
from vit_tpu.data.folders import from_folders
from vit_tpu.errors import UserError
from vit_tpu.evaluation import loading, outputs
from vit_tpu.evaluation.evaluating import evaluate
from vit_tpu.models.vit import ViT


@pytest.fixture(scope="module")
def trained():
    return loading.from_run(trained_runs.digits())


@pytest.fixture(scope="module")
def direct():
    """Logits of the average of the weights, images and labels, computed beside the package's pipeline."""
    source = digits("validation")
    images = source.get(tf.range(source.num_examples, dtype=tf.int64))["image"].numpy().astype(np.float32) / 127.5 - 1
    return trained_runs.model_of(trained_runs.digits())(tf.constant(images)).numpy(), source.labels


def _loss(logits, labels):
    x = logits.astype(np.float64)
    return (np.log(np.exp(x).sum(1)) - x[np.arange(len(x)), labels]).mean()


def test_figures_equal_a_direct_computation(trained, direct):
    logits, labels = direct
    found = evaluate(trained)
    assert found.count == 360 and found.left_out == 0
    assert found.accuracy == (logits.argmax(1) == labels).mean()
    assert found.top5 == np.mean([y in np.argsort(-x)[:5] for x, y in zip(logits, labels)])
    assert found.loss == pytest.approx(_loss(logits, labels), rel=1e-5)
    assert found.confusion.sum() == 360 and np.trace(found.confusion) == (logits.argmax(1) == labels).sum()
    assert [row["count"] for row in found.per_class] == np.bincount(labels).tolist()
    assert found.images_per_second > 0 and "average (EMA)" in str(found)
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(found.confidence, share.max(1), rtol=1e-5)


@pytest.mark.parametrize("batch", [7, 360, 1000])
def test_padding_counts_nothing(trained, direct, batch):
    found = evaluate(trained, batch_size=batch)
    assert found.count == 360 and found.loss == pytest.approx(_loss(*direct), rel=1e-5)
    assert found.accuracy == (direct[0].argmax(1) == direct[1]).mean()


def test_two_replicas_count_every_example_once(mirrored, direct):
    with mirrored.scope():
        model = ViT(
            "Ti/2", image_size=8, channels=1, num_classes=10, pool="gap", width=16, depth=1, mlp_dim=32, num_heads=2
        )
    for target, filled in zip(model.parameters(), trained_runs.model_of(trained_runs.digits()).parameters()):
        target.variable.assign(filled.variable)
    source = digits("validation")
    odd = from_arrays(source.get(tf.range(355, dtype=tf.int64))["image"].numpy(), source.labels[:355])
    found = evaluate(model, odd, batch_size=50)
    assert found.count == 355 and "2 replica" in found.devices
    assert found.loss == pytest.approx(_loss(direct[0][:355], direct[1][:355]), rel=1e-5)
    with pytest.raises(UserError, match="does not divide among 2 replicas: use 6 or 8"):
        evaluate(model, odd, batch_size=7)


def test_the_weights_and_their_average_differ(trained):
    raw = evaluate(trained_runs.digits(), ema=False)
    assert raw.loss != evaluate(trained).loss and "trained weights" in raw.weights


def test_label_rows_and_sigmoid_give_mean_average_precision():
    from sklearn.metrics import average_precision_score

    rng = np.random.default_rng(0)
    model = ViT("Ti/4", image_size=8, channels=1, num_classes=7, pool="gap", width=8, depth=1, mlp_dim=8, num_heads=1)
    model.head.params["kernel"].assign(rng.normal(size=(8, 7)))
    images = rng.integers(0, 255, (50, 8, 8, 1)).astype(np.uint8)
    rows = (rng.random((50, 7)) < 0.25).astype(np.float32)
    rows[3] = rows[40] = 0.0
    model.compile(loss="sigmoid")
    found = evaluate(model, from_arrays(images, rows), batch_size=16)
    kept = rows.max(1) > 0
    logits = model(tf.constant(images.astype(np.float32) / 127.5 - 1)).numpy()[kept].astype(np.float64)
    rows = rows[kept]
    assert found.count == kept.sum() and found.left_out == (~kept).sum() >= 2
    wanted = np.mean([average_precision_score(rows[:, i], logits[:, i]) for i in range(7)])
    assert found.mean_average_precision == pytest.approx(wanted, rel=1e-6)
    assert found.accuracy == (rows[np.arange(len(rows)), logits.argmax(1)] > 0).mean()  # hit@1
    assert found.loss == pytest.approx((np.log1p(np.exp(logits)) - rows * logits).sum(1).mean(), rel=1e-5)
    assert found.confusion is None and found.per_class[0]["average_precision"] is not None
    assert "mAP" in str(found) and "left out" in str(found)


def test_an_unreadable_file_is_named(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(tf.io.encode_png(np.zeros((8, 8, 1), np.uint8)).numpy())
    (tmp_path / "b/3.png").write_bytes(b"")
    model = ViT("Ti/4", image_size=8, channels=1, num_classes=2, pool="gap", width=8, depth=1, mlp_dim=8, num_heads=1)
    with pytest.raises(UserError, match="3.png .the file is empty"):
        evaluate(model, from_folders(tmp_path, "train", validation_share=1e-9))


def test_all_is_every_image_of_data_without_a_validation_split(tmp_path):
    for i in range(30):
        path = tmp_path / f"{i % 2}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tf.io.encode_png(np.full((8, 8, 1), 8 * i, np.uint8)).numpy())
    trained = loading.from_run(trained_runs.digits(), overrides=loading.data_overrides(str(tmp_path)))
    assert outputs.open_source(trained, "all").num_examples == 30
    assert evaluate(trained, split="all").count == 30
    with pytest.raises(UserError, match="validation split of its own"):
        evaluate(trained, "digits", split="all")


def test_features_are_what_the_head_reads(trained):
    source = digits("validation")
    rows, labels = outputs.features(trained, source, batch=50)
    head = trained.model.head.params
    images = source.get(tf.range(360, dtype=tf.int64))["image"].numpy().astype(np.float32) / 127.5 - 1
    wanted = trained.model(tf.constant(images)).numpy()
    np.testing.assert_allclose(rows @ head["kernel"].numpy() + head["bias"].numpy(), wanted, atol=1e-4)
    np.testing.assert_array_equal(labels, source.labels)
    means, _ = outputs.features(trained, source, "mean")
    np.testing.assert_allclose(means, rows, atol=1e-5)  # this model pools by the mean
    with pytest.raises(UserError, match="no class token"):
        outputs.features(trained, source, "cls")


def test_the_papers_crop_is_the_middle_of_a_square_resize():
    # 16 wide, 8 high, resized to 8x8 of 7 / 8 is 8x8 -> the middle 7x7 of it, whatever the shape was.
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (1, 16, 24, 3)).astype(np.uint8)
    model = ViT("Ti/7", image_size=7, num_classes=2, pool="gap", width=8, depth=1, mlp_dim=8, num_heads=1)
    trained = loading.of_model(model)
    trained = loading.Trained(
        model, loading.with_overrides(trained.config, {"data.crop": "inception"}), (), "", trained.here
    )
    from vit_tpu.data.broken import BrokenRecords

    batch, _, _ = next(iter(outputs.paper_dataset(trained, from_arrays(image, np.array([0])), 1, BrokenRecords(0))))
    resized = tf.cast(tf.image.resize(image, (8, 8), method="bilinear"), tf.uint8).numpy()
    np.testing.assert_allclose(batch.numpy(), resized[:, 0:7, 0:7].astype(np.float32) / 127.5 - 1, atol=1e-6)


def test_models_without_a_prediction_say_so():
    source = from_arrays(np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, int))
    shape = dict(image_size=8, width=8, depth=1, mlp_dim=8, num_heads=1)
    with pytest.raises(UserError, match="has no head"):
        evaluate(ViT("Ti/4", num_classes=0, pool="gap", **shape), source)
    with pytest.raises(UserError, match="output for each token"):
        evaluate(ViT("Ti/4", num_classes=2, pool="none", **shape), source)


def test_outputs_that_are_not_finite_are_no_result():
    model = ViT("Ti/4", image_size=8, num_classes=2, pool="gap", width=8, depth=1, mlp_dim=8, num_heads=1)
    model.head.params["bias"].assign([np.nan, 0.0])
    with pytest.raises(FloatingPointError, match="not finite"):
        evaluate(model, from_arrays(np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, int)))


def test_the_module_is_the_function(trained):
    assert vit_tpu.evaluate(trained).accuracy == evaluate(trained).accuracy


def test_few_shot_accuracy_is_watched_during_training():
    from vit_tpu.evaluation import fewshot
    from vit_tpu.evaluation.watch import FewShotCallback

    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (32, 8, 8, 1)).astype(np.uint8)
    labels = np.arange(32) % 2
    images[labels == 1, :4] //= 4
    train, test = from_arrays(images[:20], labels[:20]), from_arrays(images[20:], labels[20:])
    model = ViT("Ti/4", image_size=8, channels=1, num_classes=2, pool="gap", width=8, depth=1, mlp_dim=8, num_heads=1)
    model.compile("adamw", "softmax", steps_per_execution=2, ema=0.5)
    lines = []
    watch = FewShotCallback(train, test, 4, shots=(1, 3), batch_size=5, averaged=True, say=lines.append)
    batches = tf.data.Dataset.from_tensors((images[:4].astype(np.float32) / 255, labels[:4].astype(np.int32))).repeat()
    model.fit(batches, steps_per_epoch=10, epochs=1, verbose=0, callbacks=[watch])
    assert [entry["step"] for entry in watch.results] == [4, 8, 10] and len(lines) == 3
    assert watch.run.experimental_get_tracing_count() == 1
    with model.averaged_weights():
        trained = loading.of_model(model)
        sets = [outputs.features(trained, source) for source in (train, test)]
    wanted = fewshot.few_shot(*sets[0], *sets[1], (1, 3), classes=2)
    assert watch.results[-1]["fewshot"] == {1: wanted.mean(1), 3: wanted.mean(3)}
    with pytest.raises(UserError, match="class 0 has 10"):
        FewShotCallback(train, test, 4, shots=(11,))
