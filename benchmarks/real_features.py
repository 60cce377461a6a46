"""k-NN accuracy of published weights on a tree of class folders, beside features that another implementation computed.

  python benchmarks/real_features.py --weights=dinov2_s14.npz --data=CIFAR10_DIR --reference=features.npz

The reference holds A, ya, B, yb: class token and mean patch token side by side, of the first 40 training and the first
20 test images of each class in sorted order. Images are resized by Pillow (bicubic) to 224, as the reference was made.
"""

from __future__ import annotations

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

SIZE = 224


def images(root: pathlib.Path, count: int):
    """The first `count` files of each class as a source in memory."""
    from PIL import Image

    from vit_tpu.data.arrays import from_arrays

    classes = sorted(path.name for path in root.iterdir())
    pixels, labels = [], []
    for label, name in enumerate(classes):
        for file in sorted((root / name).iterdir())[:count]:
            picture = Image.open(file).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)
            pixels.append(np.asarray(picture))
            labels.append(label)
    return from_arrays(np.stack(pixels), np.array(labels), name=root.name, class_names=classes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="weight file of a ViT with a class token")
    parser.add_argument("--data", required=True, help="folder with train/<class>/* and test/<class>/*")
    parser.add_argument("--reference", required=True, help="features of the same images")
    args = parser.parse_args()
    import vit_tpu
    from vit_tpu.evaluation import neighbours, outputs

    trained = vit_tpu.load_trained(
        weights=args.weights, overrides={"model.image_size": SIZE, "model.gelu": "erf"}, resize="bicubic",
        normalize="imagenet", verbose=True,
    )  # fmt: skip
    root, reference = pathlib.Path(args.data), np.load(args.reference)
    train, test = images(root / "train", 40), images(root / "test", 20)
    width = trained.model.variant.width
    for kind, columns in (("cls", slice(0, width)), ("mean", slice(width, 2 * width))):
        x, y = outputs.features(trained, train, kind, batch=40)
        x_test, y_test = outputs.features(trained, test, kind, batch=40)
        for found, wanted in ((x, reference["A"][:, columns]), (x_test, reference["B"][:, columns])):
            norms = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
            print(f"{kind}: largest difference {np.abs(found - wanted).max():.4f}, "
                  f"smallest cosine {((found * wanted).sum(1) / norms).min():.7f}")  # fmt: skip
        ours = (neighbours.predict(x, y, x_test, k=10) == y_test).mean()
        theirs = neighbours.predict(reference["A"][:, columns], reference["ya"], reference["B"][:, columns], k=10)
        stored = (theirs == reference["yb"]).mean()
        print(f"{kind}: 10-NN accuracy {ours:.3f}, of the reference's features {stored:.3f}")


if __name__ == "__main__":
    main()
