"""The model card: what the artefact is, what it was trained on, what it reached, how to call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vit_tpu.models.vit import ViT

CALLS = {
    "saved_model": """```python
import tensorflow as tf

model = tf.saved_model.load("1")  # keep it: its variables live as long as it does
run = model.signatures
run["files"](files=tf.constant([open("image.jpg", "rb").read()]))["probabilities"]  # JPEG, PNG, GIF, BMP, WebP
run["pixels"](pixels=images)  # uint8 [B, any, any, {channels}]
run["serving_default"](images=images)  # float32 [B, {height}, {width}, {channels}] in [-1, 1]
```""",
    "onnx": """```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
session.run(None, {{"images": images}})  # float32 [B, {height}, {width}, {channels}] in [-1, 1]
```""",
    "tflite": """```python
from ai_edge_litert.interpreter import Interpreter

run = Interpreter("model.tflite").get_signature_runner()
run(images=images)  # float32 [1, {height}, {width}, {channels}] in [-1, 1]
```""",
}


def model_card(
    model: ViT,
    class_names: Sequence[str],
    preprocessing: Mapping[str, Any],
    report: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> str:
    """Returns Markdown.

    Args:
      model: exported.
      class_names: in the order of the logits.
      preprocessing: as in preprocessing.json.
      report: as in export.json.
      facts: sections by title, each a mapping or a text.
    """
    v = model.variant
    height, width = model.image_size
    parameters = sum(int(variable.shape.num_elements() or 0) for variable in model.trainable_variables)
    lines = [
        f"# {model.settings['variant']} for {height}x{width} images, {len(class_names)} classes",
        "",
        f"A Vision Transformer of {v.depth} blocks, width {v.width}, {v.num_heads} heads, patches of "
        f"{v.patch_size}x{v.patch_size}, pooling `{model.pool}`: {parameters:,} parameters, "
        f"{model.flops() / 1e6:,.3g} MFLOPs an image.",
        "",
        f"Exported as {report['format']} by vit_tpu {report['versions']['vit_tpu']}. Over {report['examples']} images "
        f"its outputs differ from the float32 model's by at most {report['difference']:.2g}, from the trained model's "
        f"by at most {report['training_difference']:.2g}.",
        "",
        "## Use",
        "",
        CALLS[report["format"].split("_int8")[0]].format(height=height, width=width, channels=model.channels),
        "",
        "Logits and probabilities are float32, in the order of `labels.txt`. An image of another size is prepared as",
        "`preprocessing.json` says: " + ", ".join(f"{name} {value}" for name, value in preprocessing.items()) + ".",
        "",
    ]
    for title, content in facts.items():
        lines += [f"## {title}", ""]
        if isinstance(content, Mapping):
            lines += [f"- {name}: {value}" for name, value in content.items()]
        else:
            lines += ["```", str(content).strip(), "```"]
        lines.append("")
    return "\n".join(lines)
