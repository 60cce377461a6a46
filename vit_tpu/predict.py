"""Predicts the classes of image files with a trained model.

Examples:
  python -m vit_tpu.predict --workdir=runs/cifar photo.jpg
      the label with its probability, and the runners-up
  python -m vit_tpu.predict --workdir=runs/cifar photos/ 'more/**/*.png' --out=labels.csv --sheet=sheet.png
      all images below a folder and those a glob matches; a table in a file; a contact sheet to look at
  find photos -newer last.txt | python -m vit_tpu.predict --workdir=runs/cifar - --out=labels.jsonl
      names on standard input, one a line
  python -m vit_tpu.predict --workdir=runs/cifar photos/ --explain=looks.png
      where the model looks: attention rollout, or the MAP head's attention with --attention=map
  python -m vit_tpu.predict --weights=vit_b16.npz --class_names=imagenet.txt photo.jpg
      a weight file instead of a run

Unreadable files are named on standard error and all others are done.

Exit codes: 0 done, 1 some files could not be read, 2 wrong use.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from vit_tpu import model_flags
from vit_tpu.command import check_file, execute, write_json
from vit_tpu.errors import UserError

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".pdf", ".svg")


def main(arguments: list[str] | None = None) -> int:
    return execute(_define, _run, __doc__, arguments, files="FILES|FOLDERS|GLOBS|-")


def _define(flags: Any, values: Any) -> None:
    model_flags.define(flags, values)
    model_flags.define_where(flags, values)
    flags.DEFINE_integer("top", 5, "classes to name for each file", flag_values=values)
    flags.DEFINE_string(
        "out", None, "write the rows to this .csv or .jsonl instead of the terminal", flag_values=values
    )
    flags.DEFINE_string("sheet", None, "also draw a contact sheet into this picture", flag_values=values)
    flags.DEFINE_string("explain", None, "also draw where the model looks into this picture", flag_values=values)
    flags.DEFINE_enum(
        "attention", "rollout", ["rollout", "map"], "with --explain: rollout, or the MAP head's own", flag_values=values
    )
    flags.DEFINE_integer("sheet_images", 60, "pictures on the sheet, the first ones", flag_values=values)


def _run(values: Any, named: list[str]) -> int:
    import os

    model_flags.check(values)
    if values.top < 1:
        raise UserError(f"--top={values.top}: ask for 1 class or more")
    if values.sheet_images < 1:
        raise UserError(f"--sheet_images={values.sheet_images}: ask for 1 picture or more")
    for name in ("sheet", "explain"):
        path = getattr(values, name)
        check_file(name, path)
        if path and not path.lower().endswith(PICTURES):
            raise UserError(f"--{name}={path}: end the name in {', '.join(PICTURES)}")
    from vit_tpu.evaluation import files, predicting  # TensorFlow loads here

    if values.out:
        predicting.check_out(values.out)
    found, notes = files.collect(named, sys.stdin)
    _check_outputs(values, found)
    trained = model_flags.load(values)
    if values.explain and values.attention == "map" and trained.model.pool != "map":
        raise UserError(f"--attention=map: this model pools by {trained.model.pool}, it has no MAP head; use rollout")
    for note in notes:
        print(note, file=sys.stderr)
    print(f"{trained.weights}; {trained.here.line}, {trained.config.precision}; {len(found):,} files", file=sys.stderr)
    try:
        return _predict(values, trained, found)
    except BrokenPipeError:  # the reader of our rows, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _predict(values: Any, trained: Any, found: list[str]) -> int:
    import contextlib

    from vit_tpu.evaluation import files, outputs, predicting

    unreadable, speed = files.Unreadable(), outputs.Speed()
    shown: list[tuple[Any, Any]] = []
    done = 0
    with contextlib.ExitStack() as stack:
        write = None
        if values.out:
            write = stack.enter_context(predicting.Writer(values.out, min(values.top, len(trained.names))))
        waiting: list[Any] = []
        for row, picture in predicting.each(
            trained, found, unreadable, top=values.top, batch_size=values.batch_size, speed=speed
        ):
            done += 1
            if (values.sheet or values.explain) and len(shown) < values.sheet_images:
                shown.append((row, picture()))
            if write is not None:
                write(row)
                continue
            waiting.append(row)
            if len(waiting) == 64:
                print("\n".join(predicting.table(waiting)), flush=True)
                waiting = []
        if waiting:
            print("\n".join(predicting.table(waiting)), flush=True)
    missing = [name for name in found if name in unreadable.reasons]
    for name in missing:
        print(f"unreadable: {files.shown(name)}: {unreadable.reasons[name]}", file=sys.stderr)
    drawn = _draw(values, trained, shown, done) if shown else []
    rate = f", {speed.images_per_second:,.0f} images/s" if speed.images_per_second else ""
    wrote = "".join(f", wrote {path}" for path in (values.out, *drawn) if path)
    failed = f", {len(missing):,} unreadable" if missing else ""
    print(f"{done:,} of {len(found):,} files predicted{failed}{rate}{wrote}", file=sys.stderr)
    if values.json:
        facts = {
            "weights": trained.weights, "files": len(found), "predicted": done,
            "images_per_second": speed.images_per_second,
            "unreadable": [{"file": files.shown(name), "reason": unreadable.reasons[name]} for name in missing],
        }  # fmt: skip
        write_json(values.json, facts)
    return 1 if missing else 0


def _check_outputs(values: Any, found: list[str]) -> None:
    """Two outputs in one file, or an output over one of the images, would destroy the first."""
    import os

    taken: dict[str, str] = {}
    for name in ("out", "json", "sheet", "explain"):
        path = getattr(values, name)
        if not path:
            continue
        other = taken.setdefault(os.path.realpath(path), name)
        if other != name:
            raise UserError(f"--{other} and --{name} would both write {path}: give them two names")
    for image in found:
        name = taken.get(os.path.realpath(image), "")
        if name:
            raise UserError(f"--{name}={getattr(values, name)} would overwrite one of the images: choose another name")


def _draw(values: Any, trained: Any, shown: list[Any], done: int) -> list[str]:
    import numpy as np

    from vit_tpu.evaluation import files, sheet
    from vit_tpu.pictures import attention

    title = f"{trained.weights}: {'the first ' if done > len(shown) else ''}{len(shown):,} of {done:,} images"
    rows, pictures = [row for row, _ in shown], [picture for _, picture in shown]
    if values.sheet:
        sheet.save(sheet.contact_sheet(rows, pictures, title), values.sheet)
    if values.explain:
        images = np.stack(pictures).astype(np.float32) / 127.5 - 1
        maps = attention.attention_maps(trained.model, images, values.attention)
        captions = [
            f"{row.label} {100 * row.probability:.0f}%\n{sheet.short(files.shown(row.file), 36)}" for row in rows
        ]
        how = "rollout" if values.attention == "rollout" else "of the MAP head"
        title = f"{title}; right: bright where the attention ({how}) is"
        sheet.save(attention.attention_figure(pictures, maps, captions, title), values.explain)
    return [path for path in (values.sheet, values.explain) if path]


class _CallableModule(types.ModuleType):
    """`vit_tpu.predict(...)` in Python is the function behind this command."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from vit_tpu.evaluation.predicting import predict

        return predict(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
