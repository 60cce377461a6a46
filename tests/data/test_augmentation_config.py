"""The keys of the data section that vary, keep and serve images: read, checked and passed on."""

import pytest

from vit_tpu import load_config
from vit_tpu.data.broken import BrokenRecords
from vit_tpu.errors import UserError
from vit_tpu.training import inputs

EVERYTHING = {
    "data.policy": "three_augment", "data.jitter": 0.3, "data.erasing": 0.5, "data.erasing_count": 2, "data.repeats": 2,
    "data.mixup": 0.2, "data.cutmix": 1.0, "data.shift": 1, "data.flip": True, "training.batch_size": 16,
}  # fmt: skip


def test_every_key_of_the_config_reaches_the_pipeline(monkeypatch):
    got = {}
    monkeypatch.setattr(inputs.pipeline, "train_pipeline", lambda source, **options: got.update(options))
    config = load_config(
        None, EVERYTHING | {"data.policy": "randaugment", "data.policy_layers": 3, "data.policy_magnitude": 7}
    )
    inputs.train_data(config, inputs.open_source(config, "train"), 5, BrokenRecords(0))
    for key in ("policy", "policy_layers", "policy_magnitude", "jitter", "erasing", "erasing_count", "repeats", "mixup",
                "cutmix", "shift", "flip", "crop", "crop_area"):  # fmt: skip
        assert got[key] == getattr(config.data, key)
    assert got["services"] == config.data.data_service and got["start_step"] == 5 and got["label_format"] == "onehot"


def test_cutmix_alone_asks_for_label_rows():
    config = load_config(None, {"data.mixup": 0.0, "data.cutmix": 1.0, "training.batch_size": 8})
    dataset = inputs.train_data(config, inputs.open_source(config, "train"), 0, BrokenRecords(0))
    assert dataset.element_spec[1].shape == (8, 10)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data.repeats": 3}, "batch_size 16 does not hold each example 3 times .data.repeats.: use 15 or 18"),
        ({"data.cutmix": -1}, "data.cutmix is -1"),
        ({"data.policy": "randaugmnt"}, 'did you mean "randaugment"'),
        ({"data.policy_magnitude": 5}, "policy_magnitude are RandAugment's, but data.policy=three_augment"),
        ({"data.policy": "randaugment", "data.policy_magnitude": 31}, "policy_magnitude is 31"),
        ({"data.erasing": 2}, "data.erasing is 2"),
        ({"data.crop_area": "0.5,0.1"}, "data.crop_area is 0.5 to 0.1"),
        ({"data.cache": "disc"}, "data.cache is"),
        ({"data.cache": "files", "data.data_service": "a:1"}, "use one of them"),
        ({"data.in_memory": True}, 'unknown key "data.in_memory"'),
        ({"training.batch_size": 2, "data.repeats": 2}, "training.batch_size 2 has one: use 4 or more"),
        ({"model.image_size": 100000}, "has 2,500,000,000 patches of 2 pixels"),
        ({"model.image_size": (0, 8)}, "model.image_size is"),
    ],
)
def test_contradictions_are_one_sentence(changes, message):
    with pytest.raises(UserError, match=message):
        load_config(None, EVERYTHING | changes)


def test_addresses_of_data_services_are_a_list():
    config = load_config(None, ["data.data_service=10.0.0.7:5050,10.0.0.8:5050"])
    assert config.data.data_service == ("10.0.0.7:5050", "10.0.0.8:5050")
    with pytest.raises(UserError, match="digits/train is in memory here"):
        inputs.train_data(config, inputs.open_source(config, "train"), 0, BrokenRecords(0))
