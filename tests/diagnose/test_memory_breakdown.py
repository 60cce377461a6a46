"""The analytic memory of a step: by hand, against the built model, in words, and what a change would save."""

import time

import pytest
import tensorflow as tf
import yaml

import vit_tpu
from vit_tpu import config as configs
from vit_tpu.diagnose import kept, memory, savings, state
from vit_tpu.training import run

PLAIN = {
    "mixup": 0.0, "training.ema": None, "evaluate_ema": False, "data.source": "synthetic", "model.num_classes": 1000,
    **dict.fromkeys(("model.width", "model.depth", "model.mlp_dim", "model.num_heads")), "model.image_size": 224,
}  # fmt: skip


DIGITS = {
    "mixup": 0.0, "training.ema": None, "evaluate_ema": False, "width": 16, "depth": 1, "mlp_dim": 32, "num_heads": 2,
    "batch_size": 32,
}  # fmt: skip


def digits(**changes):
    return vit_tpu.load_config(None, {**DIGITS, **{key.replace("__", "."): value for key, value in changes.items()}})


def config(**changes):
    return vit_tpu.load_config(None, {**PLAIN, **{key.replace("__", "."): value for key, value in changes.items()}})


def measure(changed, **known):
    return memory.breakdown(changed, channels=3, **known)


def test_parts_of_a_small_run_by_hand():
    chosen = digits(**{
        "training.ema": 0.9, "accumulation_steps": 4, "optimizer.name": "adamw", "precision": "mixed_bfloat16"
    })  # fmt: skip
    found = memory.breakdown(chosen, 10, 1, hardware="CPU")
    # Digits: 8 x 8 x 1 pixels in patches of 2, 16 tokens; width 16, one block, MLP 32, 2 heads, 10 classes.
    embedding, positions = 4 * 16 + 16, 16 * 16
    block = 4 * (16 * 16 + 16) + 2 * 16 * 32 + 32 + 16 + 4 * 16
    parameters = embedding + positions + block + 2 * 16 + 16 * 10 + 10
    cast = 4 * 16 + 4 * 16 * 16 + 2 * 16 * 32  # kernels that the layers read in bfloat16
    # 8 images: input, q, k, v, after attention, heads twice, two normalised (9 D), before and after GELU, two maps.
    one = 8 * 16 * (2 * (9 * 16 + 2 * 32 + 2 * 16) + 2 * 2 * 4)
    # Around it: the images, the encoder's output, its mean and factor, features, logits and the gradients of both.
    around = 8 * (2 * 64 + 2 * 2 * 16 * 16 + 4 * 2 * 16 + 4 * 16 + 4 * 2 * 10)
    assert found.parts == {
        "weights": 4 * parameters, "optimizer state": 8 * parameters, "EMA": 4 * parameters,
        "accumulator": 4 * parameters, "gradients": 0, "copies": 2 * cast, "activations": one + around,
        "batch": 4 * 32 * 64 + 4 * 32,
    }  # fmt: skip
    assert found.total == sum(found.parts.values()) and found.state == 16 * parameters
    assert found.moment == "backward pass of head"
    text = run.dry_run(chosen)
    for name, size in found.parts.items():
        assert not size or any(line.split() [: len(name.split())] == name.split() and memory.size_text(size) in line
                               for line in text.splitlines()), (name, size, text)  # fmt: skip
    assert "an estimate from the shapes" in text and "python -m vit_tpu.plan" in text


@pytest.mark.parametrize(
    "settings",
    [
        {"pool": "map", "registers": 2, "layer_scale": 0.1},
        {"pool": "tok", "scan": True, "representation_size": 8, "posemb": "sincos2d"},
    ],
)
def test_parameters_and_state_are_those_of_the_built_model(settings):
    chosen = digits(
        **{f"model.{k}": v for k, v in settings.items()}, width=64, num_heads=2, optimizer__name="adafactor",
        optimizer__freeze=("embedding/*",),
    )  # fmt: skip
    from vit_tpu import devices
    from vit_tpu.training import build, schedule

    model = build.build_model(chosen, devices.choose("cpu"), 10, 1, schedule.plan(chosen, 1437))
    ours = state.parameters(chosen.model, (8, 8, 1), 10)
    assert [(p.path, p.kind, p.part, p.depth, p.stacked, tuple(p.variable.shape)) for p in ours] == [
        (p.path, p.kind, p.part, p.depth, p.stacked, tuple(p.variable.shape)) for p in model.parameters()
    ]
    slots = [v for slot in model.inner_optimizer.slots.values() for v in slot.values()]
    parts = memory.breakdown(chosen, 10, 1).parts
    assert parts["optimizer state"] == sum(v.dtype.size * v.shape.num_elements() for v in slots)
    assert parts["weights"] == sum(4 * p.variable.shape.num_elements() for p in model.parameters())


def test_gradients_replace_activations_on_the_way_down():
    shallow = measure(config(model__variant="B/16", batch_size=64))
    assert shallow.moment == "backward pass of head" and shallow.parts["gradients"] == 0
    small = measure(config(model__variant="B/16", batch_size=1))
    assert small.moment == "update" and small.parts["activations"] == 0
    assert small.parts["gradients"] == small.parts["weights"]
    deep = measure(config(model__variant="G/14", batch_size=16, model__remat="block", precision="mixed_bfloat16"))
    assert deep.moment.startswith("backward pass of blocks/0/") and deep.parts["gradients"] > 0


def test_frozen_parts_keep_nothing_and_have_no_state():
    whole = measure(config(model__variant="S/16"))
    probe = measure(config(model__variant="S/16", optimizer__freeze=("body",)))
    head = 4 * (384 * 1000 + 1000)
    assert probe.parts["optimizer state"] == 2 * head and probe.parts["gradients"] <= head
    assert probe.parts["activations"] < whole.parts["activations"] / 50
    upper = measure(config(model__variant="S/16", optimizer__freeze=("embedding/*", "posemb", "blocks/0", "blocks/1")))
    assert "blocks/1" not in upper.by("layer") and "blocks/2" in upper.by("layer")


def test_rematerialisation_keeps_one_input_a_block_and_one_whole_block():
    plain, less = (measure(config(model__variant="S/16", model__remat=remat)) for remat in ("none", "block"))
    stream = 4 * 64 * 196 * 384
    assert less.by("kind")["block input"] == 12 * stream and less.by("kind")["query"] == stream
    assert plain.by("kind")["query"] == 12 * stream


def test_long_sequences_are_fullest_in_the_attention():
    found = measure(config(model__variant="Ti/16", model__image_size=768, batch_size=2, model__remat="block"))
    assert found.moment == "backward pass of blocks/11/attention"


def test_largest_arrays_are_named_by_layer():
    found = measure(config(model__variant="B/16", batch_size=64)).largest(2)
    assert found[0] == ("blocks/*/mlp", "before GELU float32[64, 196, 3072]", 12, 4 * 64 * 196 * 3072)
    assert found[1][0] == "blocks/*/attention" and found[1][1] == "attention weights float32[64, 12, 196, 196]"


def test_the_largest_model_takes_milliseconds():
    chosen = config(model__variant="G/14", optimizer__name="adafactor")
    measure(config(model__variant="S/16"))  # imports
    began = time.process_time()
    assert measure(chosen, classes=29593).parts["weights"] > 7 * 2**30
    assert time.process_time() - began < 0.5


def test_micro_batches_that_cost_more_than_they_free_are_remarked():
    few = digits(batch_size=4, accumulation_steps=2, width=64, mlp_dim=256, depth=2)
    assert "2 micro-batches cost more memory than they free" in run.dry_run(few)
    assert "than they free" not in run.dry_run(digits(batch_size=256, accumulation_steps=4))


def test_savings_come_in_order_and_are_those_of_the_changed_config():
    chosen = config(model__variant="B/16", batch_size=256)
    before = measure(chosen).total
    found = savings.alone(chosen, measure, before / 4)
    keys = [saving.change.partition("=")[0] for saving in found]
    assert keys == [
        "precision", "optimizer.momentum_dtype", "training.accumulation_steps", "model.remat", "optimizer.name",
        "training.batch_size", "model.image_size",
    ]  # fmt: skip
    for saving in found:
        again = chosen
        for pair in saving.change.split(" "):
            key, _, value = pair.partition("=")
            again = configs.replace(again, key, yaml.safe_load(value))
        assert measure(again).total == saving.total == before - saving.saved
    steps = savings.together(chosen, measure, before / 4)
    assert steps[-1].total <= before / 4 < steps[-2].total
    assert savings.together(chosen, measure, 1000) == []


def test_what_is_kept_off_tpus_has_the_operands_of_products():
    shape = memory.shape_of(config(model__variant="Ti/16", training__jit=True), None, 3, hardware="GPU")
    block = kept.block(shape, 3, again=False)
    kinds = [tensor.kind for tensor in block.kept]
    assert kinds.count("normalised") == 2 and "after GELU" in kinds and "tanh of GELU" in kinds
    assert all(tensor.layer.startswith("blocks/3") for tensor in block.kept)
    assert tf.as_dtype(block.kept[0].dtype) == tf.float32
