"""The folder in which the pages' commands run: what they name is there, only small.

A command runs as it is written, but for sizes: `SMALL` is added to what builds a model, and the words in `STAND_INS`
become files of the folder.
"""

import os
import pathlib
import shutil

import numpy as np
from doc_pages import ROOT
from PIL import Image

SHAPE = {"width": 16, "depth": 1, "mlp_dim": 32, "num_heads": 2}
SMALL = [f"--set=model.{key}={value}" for key, value in SHAPE.items()]
# Added to every training command: as few examples a step as the folder has, and few steps.
SHORT = ["--batch_size=8", "--steps=12", "--set=training.steps_per_execution=4", "--set=schedule.warmup=2"]


def make(place: pathlib.Path) -> None:
    """Fills `place`: experiments, images, weights, and two trained runs."""
    for name in ("experiments", "benchmarks", "docs", "Makefile", "setup.cfg"):
        (place / name).symlink_to(ROOT / name)
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 6)):
        for label, kind in enumerate(("cat", "dog")):
            folder = place / "DIR" / split / kind
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 128, (32, 32, 3)) + 100 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.jpg")
    for folder in ("photos", "more"):
        shutil.copytree(place / "DIR" / "test" / "cat", place / folder)
    shutil.copy(place / "photos" / "0.jpg", place / "image.jpg")
    for number in range(3):
        Image.open(place / "photos" / f"{number}.jpg").save(place / "more" / f"{number}.png")
    _weights(place)
    _runs(place)


def _weights(place: pathlib.Path) -> None:
    import vit_tpu

    for name, variant in (("vit_b16.npz", "B/16"), ("dinov2_s14.npz", "S/14"), ("dinov2.npz", "S/14")):
        side = 3 * int(variant.split("/")[1])
        gelu = "erf" if "dinov2" in name else "tanh"
        model = vit_tpu.ViT(variant, image_size=side, num_classes=3, pool="tok", gelu=gelu, **SHAPE)
        vit_tpu.save_weights(model, str(place / name), format="big_vision", verbose=False)


def _runs(place: pathlib.Path) -> None:
    from vit_tpu import train

    here = pathlib.Path.cwd()
    os.chdir(place)
    try:
        short = ["--steps=4", "--set=training.steps_per_execution=2", *SMALL]
        assert train.main([*short, "--batch_size=32", "--profile=3,4", "--workdir=runs/digits"]) == 0
        folder = ["--set=data.source=folder", "--set=data.path=DIR", "--set=model.image_size=32", "--model=Ti/16"]
        shape = [f"--set=model.{key}={value}" for key, value in SHAPE.items()]
        assert train.main([*folder, *short, *shape, "--batch_size=8", "--workdir=runs/cifar"]) == 0
        shutil.copytree("runs/cifar", "RUN")
        # What a run that failed leaves, with the trace and the checkpoint of the one above.
        overflow = ["--set=model.head_bias_init=3e38", "--set=training.label_smoothing=0.1", "--steps=4"]
        assert train.main([*overflow, *SMALL, "--batch_size=32", "--workdir=runs/first"]) == 1
        for folder in ("logs", "checkpoints"):
            shutil.copytree(f"runs/digits/{folder}", f"runs/first/{folder}", dirs_exist_ok=True)
        pathlib.Path("FILE.yaml").write_text(
            "model: {variant: B/16, image_size: 48, pool: tok}\ndata: {source: folder, path: DIR}\n"
            "training: {epochs: 1, batch_size: 8}\n"
        )
    finally:
        os.chdir(here)
