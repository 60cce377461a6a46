"""A run that several test files look at, made once a session: a checkpoint of random weights and a config."""

import atexit
import functools
import pathlib
import shutil
import tempfile

import numpy as np
from safetensors.numpy import load_file

import vit_tpu
from vit_tpu import config as configs
from vit_tpu import devices
from vit_tpu.models.vit import ViT
from vit_tpu.training import build, schedule, state

TINY = {
    "mixup": 0.0, "learning_rate": 3e-3, "width": 16, "depth": 1, "mlp_dim": 32, "num_heads": 2, "pool": "gap",
    "batch_size": 32, "training.epochs": None, "training.steps": 40, "steps_per_execution": 10, "training.ema": 0.9,
}  # fmt: skip


@functools.cache
def folder() -> pathlib.Path:
    """A place for it, removed at the end of the session."""
    path = tempfile.mkdtemp(prefix="vit_tpu_runs_")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return pathlib.Path(path)


@functools.cache
def digits(ema: float | None = 0.9, class_names: tuple[str, ...] = ()) -> pathlib.Path:
    """A run on the digits as training leaves it, 40 steps, with an average of the weights; nothing was learnt."""
    config = vit_tpu.load_config(None, TINY | {"training.ema": ema, "evaluate_ema": ema is not None})
    rng, path = np.random.default_rng(0), pathlib.Path(tempfile.mkdtemp(prefix="digits_", dir=folder()))
    model = build.build_model(config, devices.choose("cpu"), 10, 1, schedule.plan(config, 1437))
    averages = model.averages.averages if model.averages else ()
    for variable in [*(p.variable for p in model.parameters()), *averages]:
        variable.assign(rng.normal(0, 0.4, variable.shape))
    (path / "config.yaml").write_text(configs.to_yaml(config))
    state.save(model, path / "checkpoints", 40, {"config": configs.to_dict(config), "class_names": list(class_names)})
    return path


def arrays_of(run: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint, read without the package."""
    newest = max((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    weights = {f"parameters/{k}": v for k, v in load_file(newest / "model.safetensors").items()}
    return weights | load_file(newest / "training.safetensors")


def model_of(run: pathlib.Path, prefix: str = "ema/") -> ViT:
    """The run's network filled from the arrays below `prefix`."""
    config = vit_tpu.load_config(run / "config.yaml")
    model = ViT(
        config.model.variant, image_size=8, channels=1, num_classes=10, pool="gap", width=16, depth=1, mlp_dim=32,
        num_heads=2,
    )  # fmt: skip
    arrays = arrays_of(run)
    for parameter in model.parameters():
        parameter.variable.assign(arrays[prefix + parameter.path])
    return model
