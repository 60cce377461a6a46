"""Turns a weight file of one framework into another's, without a training set-up.

Examples:
  python -m vit_tpu.convert vit_b16.npz exported/ --format=timm
      a folder that timm.create_model("local-dir:exported", pretrained=True) loads
  python -m vit_tpu.convert siglip.npz:img tower/ --format=huggingface
      the sub-tree "img" of a file, as a folder that transformers' from_pretrained loads
  python -m vit_tpu.convert dinov2.safetensors dinov2_448.npz --format=keras --set image_size=448
      position embeddings resized on the way
  python -m vit_tpu.convert model.safetensors
      without a destination: what the file is and how to build a model for it

Exit codes: 0 done, 1 failed, 2 wrong use.
"""

from __future__ import annotations

import sys
from typing import Any

from vit_tpu.command import check_file, execute, write_json
from vit_tpu.errors import UserError, nearest

SETTINGS = ("num_heads", "gelu", "epsilon", "norm_position", "pool", "image_size", "patch_size")


def main(arguments: list[str] | None = None) -> int:
    return execute(_define, _run, __doc__, arguments, files="SRC DST")


def _define(flags: Any, values: Any) -> None:
    def text(name: str, default: str | None, help_: str) -> None:
        flags.DEFINE_string(name, default, help_, flag_values=values)

    text("format", None, "of DST: big_vision (.npz), timm, huggingface (.safetensors) or keras (either)")
    text("source", "auto", "of SRC: auto, big_vision, vision_transformer, timm, huggingface or keras")
    text("resize", "auto", "kernel for positions: auto, bilinear, bilinear_antialias, bicubic or bicubic_antialias")
    text("source_grid", None, "ROWS,COLUMNS of the file's positions, where they are no square")
    text("json", None, "also write the report to this file")
    flags.DEFINE_multi_string("allow", [], "glob of what may be left out (head/*); may be repeated", flag_values=values)
    flags.DEFINE_multi_string("set", [], f"key=value for {', '.join(SETTINGS)}; may be repeated", flag_values=values)
    flags.DEFINE_boolean("scan", False, "big_vision, keras: blocks stacked along axis 0", flag_values=values)


def _run(values: Any, files: list[str]) -> int:
    check_file("json", values.json)
    if len(files) not in (1, 2):
        raise UserError(f"give SRC and DST, not {len(files)} files: python -m vit_tpu.convert SRC DST --format=timm")
    if len(files) == 2 and values.format is None:
        raise UserError("give the --format of DST: big_vision, timm, huggingface or keras")
    settings = dict(_setting(pair) for pair in values.set)
    grid = _grid(values.source_grid)
    from vit_tpu import weights  # TensorFlow loads here, after the cheap checks

    if len(files) == 1:
        facts = weights.describe(files[0], values.source)
        print("\n".join([f"weights {files[0]}", *(f"  {name:<20} {value}" for name, value in facts.items())]))
        found: dict[str, Any] = facts
    else:
        report = weights.convert(
            files[0], files[1], values.format, values.source, values.allow, settings=settings, resize=values.resize,
            source_grid=grid, scan=values.scan,
        )  # fmt: skip
        print(report)
        found = report.to_dict()
    if values.json:
        write_json(values.json, found)
    return 0


def _setting(pair: str) -> tuple[str, Any]:
    name, equals, value = pair.partition("=")
    if name not in SETTINGS or not equals:
        raise UserError(f"--set {pair}{nearest(name, SETTINGS)}: write key=value with one of {', '.join(SETTINGS)}")
    try:
        if name == "image_size":
            sides = [int(side) for side in value.split(",")]
            return name, sides[0] if len(sides) == 1 else sides
        if name in ("num_heads", "patch_size"):
            return name, int(value)
        return name, float(value) if name == "epsilon" else value
    except ValueError:
        raise UserError(f"--set {pair}: {value} is not a number") from None


def _grid(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        rows, columns = (int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--source_grid={text}: write ROWS,COLUMNS, such as 14,28") from None
    return rows, columns


if __name__ == "__main__":
    sys.exit(main())
