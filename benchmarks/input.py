"""Images per second of the training input: decode, random crop to 224, flip, batch.

    python benchmarks/input.py [--images=256] [--count=1536] [--rounds=5] [--json=input.json]
    python benchmarks/input.py --memory [--epochs=3] [--json=memory.json]

Side by side, in one run and on the same files: this package's pipeline from class folders, a bare
tf.data loop that does the same and nothing else (no order, no resume, no broken files: the limit),
Pillow in as many threads as there are cores, and this package with one augmentation more. The
JPEGs are made on the spot: 500 x 375, 4:2:0, quality 90, as large in bytes as photographs. The
sides take turns; a ratio is the median over the rounds of two neighbours in time. On a machine that
does other work too, trust the CPU columns: the wall clock there measures the neighbours.

--memory reads whole epochs instead and prints the resident memory of the process after each.
"""

from __future__ import annotations

import concurrent.futures
import gc
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags
from PIL import Image

from vit_tpu.data.folders import from_folders
from vit_tpu.data.pipeline import train_pipeline

_IMAGES = flags.DEFINE_integer("images", 256, "how many files")
_COUNT = flags.DEFINE_integer("count", 1536, "images in one measurement")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "how often each side is measured; the median counts")
_SIZE = flags.DEFINE_integer("size", 224, "side of the finished image")
_BATCH = flags.DEFINE_integer("batch", 32, "batch size")
_MEMORY = flags.DEFINE_bool("memory", False, "measure host memory over epochs instead of speed")
_EPOCHS = flags.DEFINE_integer("epochs", 3, "how many epochs --memory reads after one that warms up")
_MORE = flags.DEFINE_list(
    "augmentations",
    ["randaugment", "autoaugment", "three_augment", "jitter", "erasing"],
    "measured as sides of their own",
)
_JSON = flags.DEFINE_string("json", None, "also write the numbers to this file")


def make_files(root: pathlib.Path, count: int) -> None:
    """Writes `count` JPEGs in two class folders: smooth shapes with some texture."""
    rng = np.random.default_rng(0)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.float32)
        pixels = smooth + rng.normal(0, 8, smooth.shape)
        folder = root / "train" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        image.save(folder / f"{i:05d}.jpg", quality=90)


Maker = Callable[[], Iterator[object]]  # each call starts from nothing


def ours(root: pathlib.Path, size: int, batch: int, **more: Any) -> Maker:
    source = from_folders(root, validation_share=1e-12)
    dataset = train_pipeline(source, batch_size=batch, image_size=size, crop="inception", flip=True, **more)
    return lambda: iter(dataset)


AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "randaugment": {"policy": "randaugment"}, "autoaugment": {"policy": "autoaugment"},
    "three_augment": {"policy": "three_augment"}, "jitter": {"jitter": 0.3}, "erasing": {"erasing": 0.25},
}  # fmt: skip


def bare(root: pathlib.Path, size: int, batch: int) -> Maker:
    def load(path: tf.Tensor) -> tf.Tensor:
        data = tf.io.read_file(path)
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(data), tf.zeros([1, 0, 4]), area_range=(0.05, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3), min_object_covered=0.0,
            use_image_if_no_bounding_boxes=True,
        )  # fmt: skip
        window = tf.concat([begin[:2], extent[:2]], axis=0)
        image = tf.image.resize(tf.io.decode_and_crop_jpeg(data, window, channels=3), (size, size))
        return tf.image.random_flip_left_right(image) / 127.5 - 1.0

    files = sorted(str(path) for path in root.glob("train/*/*"))
    dataset = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat()
    dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    return lambda: iter(dataset)


def pillow(root: pathlib.Path, size: int, batch: int) -> Maker:
    files = sorted(root.glob("train/*/*"))
    rng = np.random.default_rng(0)

    def load(job: tuple[pathlib.Path, np.ndarray]) -> np.ndarray:
        path, (area, aspect, x, y, flip) = job
        with Image.open(path) as image:
            height = min((area * image.height * image.width / aspect) ** 0.5, image.height)
            width = min(height * aspect, image.width)
            left, top = x * (image.width - width), y * (image.height - height)
            box = (left, top, left + width, top + height)
            done = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box)
        if flip < 0.5:
            done = done.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(done, np.float32) / 127.5 - 1

    def batches() -> Iterator[object]:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            while True:
                chosen = rng.integers(len(files), size=batch)
                draws = rng.uniform([0.05, 0.75, 0, 0, 0], [1, 4 / 3, 1, 1, 1], (batch, 5))
                jobs = [(files[i], draw) for i, draw in zip(chosen, draws)]
                yield np.stack(list(pool.map(load, jobs)))

    return batches


def measure(make: Maker, count: int, batch: int) -> tuple[float, float]:
    """Returns (wall, CPU) milliseconds an image.

    A pipeline works ahead: a clock started after its first batch finds others ready, and one left
    alive slows what is measured next. So each run is timed from its iterator's birth to its death,
    and a short run is taken from a long one: start-up and work ahead are in both. `make` must have
    run once before: what only the first run pays would be in the short run alone.
    """

    def run(steps: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        batches = make()
        for _ in range(steps):
            next(batches)
        del batches
        gc.collect()
        return time.perf_counter() - wall, time.process_time() - cpu

    short, steps = 8, max(count // batch, 1)
    low, high = run(short), run(short + steps)
    wall, cpu = (1e3 * (b - a) / (steps * batch) for a, b in zip(low, high))
    return wall, cpu


def resident() -> int:
    """Returns the bytes of memory that this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(root: pathlib.Path) -> dict[str, Any]:
    """Reads epochs with everything on and prints the resident memory after each."""
    batches = ours(
        root, _SIZE.value, _BATCH.value, policy="three_augment", erasing=0.25, cutmix=1.0, label_format="onehot"
    )()
    steps, found = max(_IMAGES.value // _BATCH.value, 1), []
    for epoch in range(_EPOCHS.value + 1):
        for _ in range(steps):
            next(batches)
        gc.collect()
        found.append(resident())
        name = f"epoch {epoch}" if epoch else "warm-up"
        print(f"{name:10s}{found[-1] / 2**20:10.1f} MiB{(found[-1] - found[0]) / 2**20:+10.1f}", flush=True)
    return {"images_an_epoch": steps * _BATCH.value, "resident_bytes": found}


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        make_files(root, _IMAGES.value)
        facts = memory(root) if _MEMORY.value else speed(root)
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(facts, indent=1) + "\n")


def speed(root: pathlib.Path) -> dict[str, Any]:
    """Measures all sides by turns and prints the table."""
    size, batch = _SIZE.value, _BATCH.value
    makers = {"vit_tpu": ours(root, size, batch), "bare tf.data": bare(root, size, batch),
              "Pillow": pillow(root, size, batch)}  # fmt: skip
    makers |= {f"+ {name}": ours(root, size, batch, **AUGMENTATIONS[name]) for name in _MORE.value if name}
    mean_bytes = statistics.mean(path.stat().st_size for path in root.glob("train/*/*"))
    for make in makers.values():
        next(make())
    rounds: list[dict[str, tuple[float, float]]] = []
    for number in range(_ROUNDS.value):  # turn by turn, also in turned order: a busy moment hits all sides alike
        order = list(makers)[:: -1 if number % 2 else 1]
        rounds.append({name: measure(makers[name], _COUNT.value, batch) for name in order})
    print(
        f"{_IMAGES.value} JPEGs of {mean_bytes / 1024:.0f} KiB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':16s}{'CPU ms/image':>14s}{'(range)':>14s}{'images/s/core':>15s}{'ratio':>7s}"
          f"{'wall images/s':>15s}{'ratio':>7s}")  # fmt: skip
    ratios = {}
    for name in makers:
        walls, cpus = zip(*(one[name] for one in rounds))
        wall, cpu = statistics.median(walls), statistics.median(cpus)
        wall_ratio, ratio = (statistics.median(r["bare tf.data"][i] / r[name][i] for r in rounds) for i in (0, 1))
        ratios[name] = {"cpu": ratio, "wall": wall_ratio}
        print(f"{name:16s}{cpu:14.2f}{f'({min(cpus):.2f}..{max(cpus):.2f})':>14s}{1e3 / cpu:15.0f}"
              f"{ratio:7.2f}{1e3 / wall:15.0f}{wall_ratio:7.2f}")  # fmt: skip
    return {
        "cores": os.cpu_count(), "load": os.getloadavg()[0], "mean_bytes": mean_bytes, "size": size, "batch": batch,
        "unit": "ms an image, each round", "ratios": ratios,
        "rounds": {n: [{"wall": one[n][0], "cpu": one[n][1]} for one in rounds] for n in makers},
    }  # fmt: skip


if __name__ == "__main__":
    app.run(main)
