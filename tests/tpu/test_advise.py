"""Advice: which changes are tried, in which order, on top of which others."""

import types

from vit_tpu import config as configs
from vit_tpu.tpu import advise, topologies

GIB = 2**30


def big(**overrides):
    found = configs.from_dict(
        {
            "model": {"num_classes": 10, "pool": "tok"},
            "data": {"source": "synthetic"},
            "optimizer": {"name": "lamb", "decay_style": "paper"},
            "training": {"steps": 10, "ema": 0.99, "batch_size": 32},
            "precision": "mixed_bfloat16",
        }
    )
    for key, value in overrides.items():
        found = configs.replace(found, key.replace("__", "."), value)
    return found


class Fake:
    """Stands for a compiler for which state, sums and remat matter; keeps what was asked."""

    def __init__(self):
        self.asked = []

    def memory(self, config, batch):
        self.asked.append((config, batch))
        total = 14 * GIB if config.optimizer.name == "lamb" else 9 * GIB
        total -= GIB if config.optimizer.momentum_dtype == "bfloat16" else 0
        total += GIB if config.training.accumulation_steps > 1 else 0  # its sum costs more than it frees
        total += batch * (GIB // 16 if config.model.remat == "block" else GIB // 4)
        total += 2 * GIB if config.training.ema else 0
        return types.SimpleNamespace(total=total, fits=total <= topologies.chip("v3").hbm_bytes)

    def advice(self, config, batch):
        memory = self.memory(config, batch)
        return advise.until_it_fits(
            types.SimpleNamespace(config=config, batch_per_core=batch, memory=memory, cores=1), self.memory
        )


def test_changes_are_tried_in_order_and_kept_if_they_save():
    fake = Fake()
    found = fake.advice(big(), 32)
    assert [a.change.split()[0] for a in found] == [
        "optimizer.momentum_dtype=bfloat16",
        "model.remat=block",
        "training.accumulation_steps=4",
        "model.pool=gap",
        "optimizer.name=adafactor",
    ]
    assert [a.saved for a in found] == [GIB, 6 * GIB, -GIB, 0, 5 * GIB]
    assert [a.kept for a in found] == [True, True, False, False, True]
    assert [a.fits for a in found] == [False] * 4 + [True]
    last = fake.asked[-1][0]
    assert last.model.remat == "block" and last.training.accumulation_steps == 1 and last.model.pool == "tok"
    assert last.optimizer.decay_style is None, "LAMB's own option must not stay with another optimizer"


def test_batch_is_halved_when_no_change_is_enough():
    config = big(model__remat="block", optimizer__name="adafactor", optimizer__decay_style=None)
    found = Fake().advice(config, 256)
    assert [a.change for a in found if a.change.startswith("batch")] == ["batch_per_core=128", "batch_per_core=64"]
    assert found[-1].fits and found[-1].total < topologies.chip("v3").hbm_bytes


def test_every_change_gives_a_valid_config():
    for _, changed in advise.changes(big(precision="float32")):
        configs.validate(changed)


def test_several_cores_are_advised_to_divide_the_state_first_and_the_weights_later():
    words = [what for what, _ in advise.changes(big(), cores=8)]
    assert words[0] == "mesh=data=8 shard=state"
    divided = configs.replace(configs.replace(big(), "mesh", "data=4,model=2"), "shard", "state")
    words = [what for what, _ in advise.changes(divided, cores=8)]
    assert words.index("model.remat=block") < words.index("shard=full") and "shard=state" not in " ".join(words)
    assert not any("shard" in what for what, _ in advise.changes(big()))
