"""The estimate of a step's memory that --dry_run prints: by hand, against the compiler's figure, in words."""

import pytest
import tiny_run

from vit_tpu.models import variants
from vit_tpu.training import estimate, run


def test_parts_of_a_small_run_by_hand():
    config = tiny_run.config(
        **{"training.ema": 0.9, "accumulation_steps": 4, "optimizer.name": "adamw", "precision": "mixed_bfloat16"}
    )
    text = run.dry_run(config)
    # Digits: 8 x 8 x 1 pixels in patches of 2, 16 tokens; width 16, one block, MLP 32, 2 heads, 10 classes.
    embedding, positions = 4 * 16 + 16, 16 * 16
    block = 4 * (16 * 16 + 16) + 2 * 16 * 32 + 32 + 16 + 4 * 16
    parameters = embedding + positions + block + 2 * 16 + 16 * 10 + 10
    kept = 32 // 4 * 2 * 16 * (6 * 16 + 2 * 16 + 32)
    wanted = {
        "weights": 4 * parameters, "optimizer state": 8 * parameters, "EMA": 4 * parameters,
        "gradients": 2 * parameters, "accumulator": 4 * parameters, "activations": kept, "batch": 4 * 32 * 64,
    }  # fmt: skip
    total = sum(wanted.values())
    lines = [line.split() for line in text.splitlines()]
    for name, size in [*wanted.items(), ("together", total)]:
        start = [*name.split(), *estimate.size_text(size).split()]
        assert any(line[: len(start)] == start for line in lines), (name, size, text)
    assert estimate.size_text(3 * 2**19) == "1.5 MiB" and estimate.size_text(2**9) == "0.5 KiB"
    assert "estimate" in text and "python -m vit_tpu.plan" in text


def test_activations_are_near_what_the_compiler_keeps():
    # libtpu 0.0.52, v3, 64 images, mixed_bfloat16, GAP, without padding: 1.45 GiB.
    found = estimate.activations(variants.variant("S/16"), 64, 196, 2)
    assert found == pytest.approx(1.45 * 2**30, rel=0.04)


def test_rematerialisation_keeps_one_input_a_block_and_one_whole_block():
    shape = variants.variant("S/16")
    plain, less = (estimate.activations(shape, 2, 196, 2, keep_inputs_only=only) for only in (False, True))
    assert less == plain // 12 + 12 * 2 * 2 * 196 * 384


def test_micro_batches_that_cost_more_than_they_free_are_remarked():
    few = tiny_run.config(batch_size=4, accumulation_steps=2, width=64, mlp_dim=256, depth=2)
    assert "2 micro-batches cost more memory than they free" in run.dry_run(few)
    assert "than they free" not in run.dry_run(tiny_run.config(batch_size=256, accumulation_steps=4))
