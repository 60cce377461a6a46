"""Ten whole training steps against big_vision's: clip, optimizer, head and body decay, schedule, loss and norms."""

import numpy as np
import pytest
import reference
import tensorflow as tf

from vit_tpu import ViT, optim


def build(refs, case, settings, jit):
    """The MAP ViT of vit_map.npz with the settings of train_cases.json, translated to our conventions."""
    model = ViT("B/16", image_size=64, num_classes=10, width=32, depth=2, mlp_dim=64, num_heads=2, pool="map")
    reference.assign(model, reference.tensors(refs("vit_map.npz")))
    s, peak = settings["schedule"], settings["lr"]
    rate = optim.schedules.ReciprocalSqrt(
        peak,
        total_steps=10,
        timescale=s["timescale"],
        warmup_steps=s["warmup_steps"],
        cooldown_steps=s["cooldown_steps"],
    )
    # The reference writes decay * peak and multiplies the head's by 100; ours is multiplied by the rate.
    decay = {"weight_decay": settings["wd"] / peak, "head_weight_decay": 100 * settings["wd"] / peak}
    kind = {"adafactor": optim.Adafactor, "adam_f32": optim.AdamW}[case]
    model.compile(kind(rate, **decay), "sigmoid", grad_clip_norm=settings["grad_clip_norm"], jit_compile=jit)
    return model


@pytest.mark.parametrize(("case", "jit"), [("adafactor", False), ("adafactor", True), ("adam_f32", False)])
def test_ten_steps_equal_the_reference(refs, case, jit):
    expected, inputs = refs(f"train_{case}.npz"), refs("train_inputs.npz")
    model = build(refs, case, refs("train_cases.json")[case], jit)
    data = tf.data.Dataset.from_tensor_slices((inputs["images"], inputs["labels"]))
    step, iterator = model.make_train_function(), iter(data)
    start = {p.path: p.variable.numpy() for p in model.parameters()}
    losses, norms, worst = [], [], {}
    for number in range(1, 11):
        logs = step(iterator)
        losses.append(float(logs["step_loss"]))
        norms.append(float(logs["grad_norm"]))
        if f"params_after_{number}/head/kernel" not in expected.files:
            continue
        wanted = reference.tensors(expected, f"params_after_{number}/")
        for parameter in model.parameters():
            if parameter.path.endswith("key/bias"):
                continue  # its gradient is zero up to rounding, which an adaptive optimizer blows up to a full step
            moved = np.linalg.norm(wanted[parameter.path] - start[parameter.path])
            error = np.linalg.norm(parameter.variable.numpy() - wanted[parameter.path])
            worst[number] = max(worst.get(number, 0.0), error / max(moved, 1e-9))
        if number == 1:
            assert all(np.array_equal(start[p.path], p.variable.numpy()) for p in model.parameters())  # rate 0
    assert worst[2] < 1e-3 and worst[10] < 1e-3, worst
    figures = expected["loss_gradnorm_updatenorm_mult"]
    np.testing.assert_allclose(losses, figures[:, 0], rtol=2e-5)
    np.testing.assert_allclose(norms, figures[:, 1], rtol=2e-4)
