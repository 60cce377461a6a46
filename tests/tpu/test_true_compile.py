"""The real compiler on a tiny model: what fails when an upgrade of TensorFlow or libtpu breaks the path."""

import importlib.util
import json

import pytest

from vit_tpu import config as configs
from vit_tpu import plan as command
from vit_tpu.models.vit import ViT
from vit_tpu.optim import state_bytes
from vit_tpu.tpu import buffers, compiler, planner, report, topologies

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='the TPU compiler is not installed: pip install "vit_tpu[plan]"'
)
BATCH = 8
TINY = {
    "model": {"variant": "Ti/4", "image_size": 32, "depth": 2, "width": 128, "mlp_dim": 256, "num_heads": 2,
              "pool": "gap", "num_classes": 100},
    "data": {"source": "synthetic", "classes": 100},
    "optimizer": {"name": "lamb"},
    "training": {"steps": 100, "batch_size": BATCH, "ema": 0.999},
    "precision": "mixed_bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("user") / "vit_tpu" / "plan"


@pytest.fixture(scope="module")
def plan(cache):
    return planner.make_plan(configs.from_dict(TINY), "v3", cycles=True, cache=cache)


@pytest.fixture(scope="module")
def compiled(plan, cache):
    [kept] = cache.glob("*.cycles.json")
    return compiler._read(kept)


def test_compiler_and_versions_are_named(plan):
    assert plan.versions["platform"] == "TFRT TPU v3"
    assert plan.versions["libtpu"] == compiler.version() and plan.versions["tensorflow"].startswith("2.")


def test_parts_add_up_to_what_the_finished_program_needs(plan, compiled):
    stats = compiled.stats
    needed = stats["argument"] + stats["output"] - stats["alias"] + stats["temp"]
    assert sum(plan.memory.parts.values()) == plan.memory.total
    assert plan.memory.total == pytest.approx(needed, rel=0.01)
    assert plan.fits


def test_state_is_what_the_optimizer_says_it_is(plan):
    settings = {k: v for k, v in TINY["model"].items() if k != "variant"}
    parameters = ViT("Ti/4", **settings).parameters()
    expected = state_bytes("lamb", parameters)
    assert plan.memory.parts["parameters"] == expected["parameters"] == plan.memory.parts["ema"]
    assert plan.memory.parts["optimizer"] == expected["allocated"] - 8
    assert plan.parameters * 4 == expected["parameters"]


def test_every_argument_is_as_large_as_its_tiles(compiled):
    arguments = [a for a in buffers.parse_assignment(compiled.assignment) if a.kind == "argument"]
    assert len(arguments) > 100
    for a in arguments:
        assert a.size == max(buffers.padded_bytes(a.values[0].shape), 512) or a.size % 512 == 0 and a.size <= 1024


def test_state_is_updated_in_place(plan, compiled):
    state = sum(plan.memory.parts[part] for part in ("parameters", "optimizer", "ema"))
    assert compiled.stats["alias"] >= state


def test_memory_stage_agrees_with_the_finished_program(plan, cache, tmp_path):
    memory = planner.make_plan(configs.from_dict(TINY), "v3", cache=tmp_path).memory
    assert memory.total == plan.memory.total and memory.parts == plan.memory.parts


def test_estimate_is_below_the_peak_and_sums_up(plan):
    c = plan.cycles
    assert c is not None and 0 < c.mfu < 1
    assert sum(c.by_kind.values()) == c.total
    assert {"attention", "mlp", "optimizer"} <= set(c.by_kind)
    assert c.images_per_second == pytest.approx(BATCH / c.seconds)


def test_largest_arrays_have_layer_names(plan):
    named = [b.layer for b in plan.memory.buffers if b.part == "activations"]
    assert sum("blocks/" in name for name in named) >= 4, named


def test_model_that_does_not_fit_is_an_answer(cache):
    config = configs.replace(configs.from_dict(TINY), "model.num_classes", 10_000_000)
    found = planner.make_plan(config, "v3", cache=cache)
    assert not found.fits and found.memory.total > topologies.chip("v3").hbm_bytes
    assert found.memory.available == topologies.chip("v3").hbm_bytes == pytest.approx(15.48 * 2**30, rel=1e-6)
    assert "DOES NOT FIT" in str(found)


def test_eight_cores_sum_their_gradients_inside_the_program(plan, cache):
    found = planner.make_plan(configs.from_dict(TINY), "v3", cores=8, batch_per_core=BATCH, cache=cache)
    assert found.cores == 8 and found.fits
    texts = [compiler._read(kept).optimized for kept in cache.glob("*.memory.json")]
    assert any("all-reduce(" in text and "replica_groups={{0,1,2,3,4,5,6,7}}" in text for text in texts)
    assert found.memory.parts["parameters"] == plan.memory.parts["parameters"]


def test_command_writes_table_json_and_picture(plan, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    file = tmp_path / "tiny.yaml"
    file.write_text(configs.to_yaml(configs.from_dict(TINY)))
    code = command.main([f"--config={file}", f"--json={tmp_path}/p.json", f"--png={tmp_path}/p.png"])
    shown = capsys.readouterr().out
    assert code == 0 and "FITS" in shown and "libtpu" in shown
    for part in ("parameters", "optimizer", "activations", "padding"):
        assert part in shown
    values = json.loads((tmp_path / "p.json").read_text())
    assert values["fits"] and values["estimated_not_measured"] and set(values["memory"]["parts"]) == set(report.PARTS)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_advice_is_compiled_change_by_change_until_the_step_fits(cache):
    config = configs.from_dict(TINY)
    for key, value in {"model.depth": 4, "training.batch_size": 49_152, "training.ema": None}.items():
        config = configs.replace(config, key, value)
    found = planner.make_plan(config, "v3", advice=True, cache=cache)
    assert not found.fits
    *tried, last = found.advice
    assert last.fits and last.kept and not any(advice.fits for advice in tried)
    assert [advice.change for advice in tried][-1] == "model.remat=block"
    assert last.change == "training.accumulation_steps=4"
    kept = [found.memory.total, *(advice.total for advice in found.advice if advice.kept)]
    assert kept == sorted(kept, reverse=True) and all(a.saved > 0 for a in found.advice if a.kept)
    for line in ("model.remat=block", "DOES NOT FIT"):
        assert line in str(found)
