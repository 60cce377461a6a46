"""The configuration: strict names and types, priorities, round trip, contradictions."""

import dataclasses
import subprocess
import sys

import pytest

from vit_tpu import config, settings
from vit_tpu.errors import UserError


def test_defaults_are_valid_and_frozen():
    loaded = config.load_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.model.pool = "gap"
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.precision = "mixed_bfloat16"


def test_overrides_win_over_the_file_and_the_last_override_wins(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("optimizer:\n  name: lamb\n  learning_rate: 1e-3\ntraining:\n  epochs: 2\n")
    assert config.load_config(path).optimizer.name == "lamb"
    assert config.load_config(path).optimizer.learning_rate == 1e-3  # YAML 1.1 reads 1e-3 as text
    loaded = config.load_config(path, ["optimizer.name=sgd", "learning_rate=0.5", "optimizer.learning_rate=0.25"])
    assert (loaded.optimizer.name, loaded.optimizer.learning_rate) == ("sgd", 0.25)
    assert loaded.training.epochs == 2
    assert config.load_config(path, {"optimizer.name": "adamw"}).optimizer.name == "adamw"


def test_a_file_starts_from_plain_defaults():
    loaded = config.from_dict({"training": {"steps": 3}})
    assert loaded.training == settings.Training(steps=3)
    assert loaded.model == settings.Model()


def test_yaml_round_trip(tmp_path):
    loaded = config.load_config(
        None,
        [
            "model.image_size=32,48",
            "optimizer.freeze=embedding/*,posemb",
            "data.crop_area=0.2,0.9",
            "schedule.warmup=5 epochs",
        ],
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(loaded))
    again = config.load_config(path)
    assert again == loaded
    assert config.differences(loaded, again) == []
    assert again.model.image_size == (32, 48)
    assert again.optimizer.freeze == ("embedding/*", "posemb")


def test_differences_name_every_key_that_changed():
    old = config.load_config()
    new = config.replace(config.replace(old, "optimizer.name", "lamb"), "precision", "mixed_bfloat16")
    assert sorted(config.differences(old, new)) == [
        f"optimizer.name: {old.optimizer.name} -> lamb",
        "precision: float32 -> mixed_bfloat16",
    ]


def test_replace_leaves_the_old_config():
    old = config.load_config()
    config.replace(old, "model.pool", "none")
    assert old == config.load_config()


def test_every_key_is_listed_once_and_can_be_set_to_its_own_value():
    loaded, keys = config.load_config(), config.all_keys()
    assert len(keys) == len(set(keys)) > 60
    for key in keys:
        value = config.get(loaded, key)
        assert config.replace(loaded, key, value) == loaded, key


@pytest.mark.parametrize(
    "override, words",
    [
        ("optimizer.nmae=lamb", 'unknown key "optimizer.nmae" .did you mean "name"'),
        ("optimiser.name=lamb", 'unknown section "optimiser" .did you mean "optimizer"'),
        ("lerning_rate=1", 'unknown key "lerning_rate" .did you mean'),
        ("name=cosine", 'key "name" is in data and optimizer and schedule: write data.name'),
        ("optimizer=lamb", "optimizer is a section; set one of its keys"),
        ("model.depth=2.5", "model.depth is 2.5: it must be a whole number or null"),
        ("model.depth=many", "model.depth is 'many'"),
        ("model.scan=1", "model.scan is 1: it must be true or false"),
        ("model.scan=maybe", "model.scan is 'maybe'"),
        ("training.batch_size=true", "training.batch_size is True"),
        ("training.batch_size=null", "training.batch_size is None"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate is 'fast': it must be a number"),
        ("model.image_size=1,2,3", "model.image_size is '1,2,3'"),
        ("data.crop_area=0.5", "data.crop_area is 0.5: it must be 2 numbers"),
        ("optimizer.name", '"optimizer.name" sets nothing: write key=value'),
        ("optimizer.name=lamp", 'optimizer.name is "lamp" .did you mean "lamb"'),
        ("schedule.name=cos", "schedule.name is"),
        ("model.variant=S16", "unknown model"),
        ("precision=bfloat16", 'use "mixed_bfloat16"'),
        ("training.batch_size=0", "training.batch_size is 0: give a number above 0"),
        ("data.source=folder", "data.source=folder needs data.path"),
    ],
)
def test_wrong_overrides_are_one_sentence(override, words):
    with pytest.raises(UserError, match=words) as caught:
        config.load_config(None, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["training.epochs=1", "training.steps=5"], "both given"),
        (["training.epochs=null", "training.steps=null"], "neither given"),
        (["training.batch_size=6", "training.accumulation_steps=4"], "use 4 or 8"),
        (["training.batch_size=2", "training.accumulation_steps=4"], "use 4 or 8|use 4"),
        ({"precision": "mixed_float16", "loss_scale.mode": "off"}, "loses small gradients"),
        (["training.ema=null", "training.evaluate_ema=true"], "needs an average: set training.ema"),
        (["training.board=all"], 'training.board is "all" .did you mean "full".*choose one of scalars, watch, full'),
        (["training.profile=5,2"], "first and last step"),
        (["training.profile=0,2"], "first and last step"),
    ],
)
def test_contradictions_are_one_sentence(overrides, words):
    with pytest.raises(UserError, match=words) as caught:
        config.load_config(None, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("model.image_size=32", "model.image_size", 32),
        ("model.image_size=[32, 64]", "model.image_size", (32, 64)),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("optimizer.learning_rate=3e-4", "optimizer.learning_rate", 3e-4),
        ("training.batch_size=1e2", "training.batch_size", 100),
        ("schedule.warmup=10%", "schedule.warmup", "10%"),
        ("schedule.warmup=100", "schedule.warmup", 100),
        ("training.grad_clip_norm=null", "training.grad_clip_norm", None),
        ("optimizer.freeze=body", "optimizer.freeze", ("body",)),
        ("pool=gap", "model.pool", "gap"),
    ],
)
def test_values_take_the_fields_type(override, key, value):
    got = config.get(config.load_config(None, [override]), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("- a\n- b\n", "holds no keys"),
        ("", "holds no keys"),
        ("a: [1\n", "is not valid YAML"),
        ("model:\n  pool: gap\n  scan: true\n  pool: map\n", 'the key "pool" is given twice, once more in line 4'),
        ("optimizer: lamb\n", "optimizer is a section with keys of its own"),
        ("modle:\n  pool: gap\n", 'unknown key "modle" .did you mean "model"'),
        ("model:\n  poool: gap\n", 'unknown key "model.poool" .did you mean "pool"'),
        ("model:\n  3: gap\n", "unknown key"),
        ("3: gap\n", "unknown key"),
    ],
)
def test_wrong_files_are_one_sentence_that_names_the_file(tmp_path, text, words):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        config.load_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "digits.yaml").write_text("{}")
    with pytest.raises(UserError, match='did you mean ".*digits.yaml"'):
        config.load_config(tmp_path / "digit.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        config.load_config(tmp_path)


def test_reading_a_config_does_not_import_tensorflow():
    code = "import sys; from vit_tpu import config; config.load_config(); print('tensorflow' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("how", ["override", "file"])
def test_loss_scale_can_be_switched_off_in_text(tmp_path, how):
    path = tmp_path / "run.yaml"
    path.write_text("loss_scale:\n  mode: off\ntraining:\n  epochs: 1\n")
    loaded = config.load_config(path) if how == "file" else config.load_config(None, ["loss_scale.mode=off"])
    assert loaded.loss_scale.mode == "off"
