"""The table of ranges on request: on a run's own data, what half precision would lose, as text and as JSON."""

import json

import numpy as np
import pytest
import tensorflow as tf

import vit_tpu
from vit_tpu import doctor
from vit_tpu.diagnose import ranges
from vit_tpu.errors import UserError
from vit_tpu.models import numerics, variants

TINY = {
    "mixup": 0.0, "training.ema": None, "evaluate_ema": False, "width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2,
    "batch_size": 64, "precision": "mixed_float16", "training.epochs": None, "training.steps": 3, "learning_rate": 0.01,
}  # fmt: skip


def test_what_each_half_precision_loses_is_counted():
    found = numerics.Range.of(tf.constant([7e4, 1.0, 1e-9, 1e-39, 0.0, 3.4e38]))
    assert found.lost("float16") == (pytest.approx(2 / 6), pytest.approx(2 / 6))
    assert found.lost("bfloat16") == (pytest.approx(1 / 6), pytest.approx(1 / 6))
    # The smallest float16 is 2^-24; half of it still rounds to it or to zero, below that everything is zero.
    assert numerics.Range.of(tf.constant([2.0**-24, 2.0**-25 * 1.01])).lost("float16") == (0.0, 0.0)


def test_first_step_of_a_config_says_that_a_zero_classifier_hides_the_rest():
    found = ranges.of_config(vit_tpu.load_config(None, TINY))
    text = str(found)
    assert "a classifier that starts at zero passes no gradient on yet" in text
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert "float16" in rows["blocks/1/mlp + residual"] and "float32" in rows["norm"] and "float32" in rows["head"]
    assert found.step == 0 and found.precision == "mixed_float16" and found.taken.culprit is None


def test_weights_too_large_for_float16_are_named(tmp_path, monkeypatch, capsys):
    build_model = ranges.build.build_model

    def spoilt(*args):
        model = build_model(*args)
        model.blocks[1].mlp.params["dense2/bias"].assign(tf.fill([16], 1e6))
        model.head.params["kernel"].assign(np.random.default_rng(0).normal(size=[16, 10]).astype(np.float32))
        return model

    monkeypatch.setattr(ranges.build, "build_model", spoilt)
    out = tmp_path / "ranges.json"
    settings = [f"--set={key}={json.dumps(value)}" for key, value in TINY.items()]
    assert doctor.main(["--ranges", *settings, f"--json={out}"]) == 0
    said = capsys.readouterr().out
    assert "float16 would lose" in said and "blocks/1/mlp, forward: 100.0% overflow" in said
    facts = json.loads(out.read_text())
    assert facts["lost"]["float16"][0].endswith("overflow") and not any(
        "overflow" in text for text in facts["lost"]["bfloat16"]
    )
    (mlp,) = [row for row in facts["ranges"] if row["where"] == "blocks/1/mlp, forward"]
    assert mlp["float16"][0] == 1.0 and mlp["bfloat16"] == [0.0, 0.0] and mlp["high"] > 9e5


def test_a_folder_without_a_run_and_two_questions_are_refused(tmp_path, capsys):
    assert doctor.main(["--ranges", f"--workdir={tmp_path}"]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert doctor.main(["--ranges", "--memory"]) == 2
    assert doctor.main(["--memory", "--replay=x"]) == 2
    with pytest.raises(UserError):
        ranges.of_run(str(tmp_path))


def test_memory_of_the_largest_model_is_told_without_building_it(tmp_path, capsys):
    out = tmp_path / "memory.json"
    settings = ["--config=experiments/vit_G14_jft.yaml", "--set=model.num_classes=29593", "--set=batch_size=2048"]
    assert doctor.main(["--memory", *settings, "--hardware=TPU", "--replicas=64", f"--json={out}"]) == 0
    said = capsys.readouterr().out
    assert "weights" in said and "blocks/*/mlp" in said and "what to change" in said
    facts = json.loads(out.read_text())
    shape = variants.variant("G/14")
    assert facts["parts"]["weights"] == 4 * variants.parameter_count(
        shape, image_size=224, num_classes=29593, pool="map"
    )
    assert facts["changes"] and all(row["saved"] > 0 for row in facts["changes"])
