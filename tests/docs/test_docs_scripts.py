"""The scripts behind the numbers of the pages measure what they say; figures of the pages are the scripts' own."""

import argparse
import dataclasses
import importlib.util
import re
import sys

import pytest
from doc_pages import ROOT

from vit_tpu import config


def script(name):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_baseline_has_the_shape_length_and_batch_of_the_recipe_and_none_of_its_means():
    recipe = config.load_config(ROOT / "experiments" / "cifar10.yaml", {"data.path": "/d", "seed": 2})
    plain = script("recipe").plain(recipe)
    config.validate(plain)
    for key in ("width", "depth", "mlp_dim", "num_heads", "patch_size", "variant", "image_size"):
        assert getattr(plain.model, key) == getattr(recipe.model, key)
    for key in ("batch_size", "epochs", "steps", "seed"):
        assert getattr(plain.training, key) == getattr(recipe.training, key)
    assert (plain.model.pool, plain.model.posemb) == ("tok", "learn")
    assert (plain.data.flip, plain.data.shift, plain.data.mixup, plain.data.policy) == (False, 0, 0.0, "none")
    assert (plain.optimizer.name, plain.optimizer.weight_decay) == ("adamw", 0.0)  # that is Adam
    assert (plain.schedule.name, plain.schedule.warmup) == ("constant", 0)
    assert plain.training.grad_clip_norm is None and plain.training.label_smoothing == 0.0 == (plain.training.ema or 0)


def test_the_tables_mean_is_the_mean_of_the_seeds():
    rows = [{"accuracy": a, "cpu_seconds": 10.0} for a in (0.5, 0.52, 0.57)]
    assert "| recipe | 50.0, 52.0, 57.0 | **53.0 %** | 50.0 to 57.0 | 10 |" in script("recipe").table({"recipe": rows})


def test_the_pages_means_are_those_of_its_seeds():
    text = (ROOT / "docs" / "recipes.md").read_text()
    rows = re.findall(r"^\| (recipe|baseline) \| ([\d., ]+) \| \*\*([\d.]+) %\*\*", text, re.MULTILINE)
    assert len(rows) == 2
    for _, seeds, mean in rows:
        scores = [float(score) for score in seeds.split(",")]
        assert len(scores) == 3 and sum(scores) / 3 == pytest.approx(float(mean), abs=0.06)
    assert float(rows[0][2]) > float(rows[1][2]) + 3


@pytest.fixture
def policies(monkeypatch):
    import os

    before = os.environ.get("XLA_FLAGS")
    module = script("policies")
    if before is None:
        del os.environ["XLA_FLAGS"]
    else:
        os.environ["XLA_FLAGS"] = before
    return module


def test_a_row_of_the_policy_table_is_a_trained_model(policies):
    args = argparse.Namespace(width=16, depth=1, heads=2, image=8, patch=4, batch=4, steps=10)
    first = policies.measure(args, {})
    tenfold = policies.measure(args, {"per_execution": 10})
    assert first["cpu_ms"] > 0 and first["temp_bytes"] is None
    assert first["loss"] == pytest.approx(tenfold["loss"], rel=1e-5) and first["loss"] < 2.4
    assert "| float32 | off | 1 | adamw |" in policies.table([first])


def test_rows_of_the_policy_table_change_one_thing_and_cover_what_was_asked():
    rows = script("policies").ROWS
    assert all(len(row) <= 2 for row in rows)
    assert {row.get("per_execution", 1) for row in rows} == {1, 10, 50}
    assert {row.get("optimizer", "adamw") for row in rows} == {"adamw", "lamb", "adafactor"}
    pairs = {(row.get("precision", "float32"), row.get("jit", False)) for row in rows}
    assert len(pairs) == 6


def test_rows_of_the_trade_off_are_configs_of_which_each_changes_one_decision():
    study = script("trade_off")
    start = config.from_dict(study.base(8))
    config.validate(start)
    rows = list(study.rows(8).values())
    assert len(rows) == 8
    for changes in rows:
        changed = start
        for key, value in changes.items():
            changed = config.replace(changed, key, value)
        config.validate(changed)
        assert dataclasses.replace(changed, model=start.model) == start
    assert {"model.num_heads": 12} in rows and {"model.num_heads": 20} in rows and {"model.depth": 6} in rows
