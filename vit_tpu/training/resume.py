"""Where a run goes on: which checkpoint, what has changed since it was written, where in the data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from vit_tpu import config as configs
from vit_tpu.errors import UserError, nearest
from vit_tpu.settings import SECTIONS, Config
from vit_tpu.training import checkpoints, state, storage

# What may differ between the parts of one run: nothing here changes what an update means. Sections end with a dot.
FREE = (
    "workdir", "resume", "allow_config_change", "strategy", "tpu", "mesh", "shard", "virtual_devices", "workers",
    "worker", "worker_timeout", "precision", "loss_scale.", "init_from",
    "init_allow", "init_resize", "model.remat", "model.head_bias_init", "data.max_broken", "data.cache",
    "data.cache_dir", "data.data_service", "training.epochs", "training.steps", "training.accumulation_steps",
    "training.log_every",
    "training.evaluate_every", "training.evaluate_ema", "training.checkpoint_every", "training.keep",
    "training.keep_every", "training.keep_best", "training.save_weights", "training.on_nonfinite",
    "training.max_rollbacks", "training.steps_per_execution", "training.jit", "training.profile",
    "training.max_skipped", "training.deterministic", "training.check_numerics",
    "training.board",
)  # fmt: skip
# What decides which variables there are: a checkpoint has no place for other ones.
SHAPE = (
    "model.variant", "model.image_size", "model.num_classes", "model.pool", "model.posemb", "model.registers",
    "model.layer_scale", "model.representation_size", "model.scan", "model.norm_position", "model.width",
    "model.depth", "model.mlp_dim", "model.num_heads", "model.patch_size", "data.channels", "optimizer.name",
    "optimizer.momentum_dtype", "optimizer.freeze",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run continues from.

    Attributes:
      step: training steps taken. examples: position in the stream of examples. micro_steps: micro-batches so far.
      rollbacks: how often the run went back because of a loss that was not finite.
      path, manifest: the checkpoint, or None and {} for a fresh start.
      notes: sentences for the start-up summary.
    """

    step: int = 0
    examples: int = 0
    micro_steps: int = 0
    rollbacks: int = 0
    path: str | None = None
    manifest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def from_checkpoint(path: str, manifest: Mapping[str, Any], notes: tuple[str, ...] = ()) -> Start:
    """Returns the start that a verified checkpoint gives."""
    position = manifest.get("position", {})
    step = int(manifest["step"])
    return Start(
        step, int(position.get("examples", 0)), int(position.get("micro_steps", 0)),
        int(manifest.get("rollbacks", 0)), path, manifest, notes,
    )  # fmt: skip


def find(config: Config, root: str) -> Start:
    """Returns what a run of `config` continues from, after checking that it may.

    Args:
      config: `resume` is "auto" (the newest whole checkpoint under `root`, if there is one), "never", or a path: the
        folder of a run or of one checkpoint. Checkpoints under `root` come before the path, so that the same command
        continues a run that began from another one.
      root: the `checkpoints` folder of the run.

    Raises:
      UserError: no such checkpoint, a config that does not fit it, or a run that "never" would write over.
    """
    own = checkpoints.steps(root)
    if config.resume == "never":
        if own:
            raise UserError(
                f"{root} holds a run of {own[0]:,} steps, which resume=never would write over: choose another "
                "workdir, or --resume=auto to continue it"
            )
        return Start()
    found = checkpoints.newest(root)
    if found is None and own:
        raise UserError(
            f"none of the {len(own)} checkpoints in {root} is whole: choose another workdir to start again, there with "
            "--resume=PATH to continue from a checkpoint elsewhere"
        )
    notes: list[str] = []
    if found is not None and own[0] > found[1]["step"]:
        notes.append(f"the checkpoint of step {own[0]:,} is damaged: step {found[1]['step']:,} is used")
    if config.resume != "auto":
        if storage.join(os.path.abspath(config.resume), "").startswith(storage.join(os.path.abspath(root), "")):
            raise UserError(
                f"resume={config.resume} lies in the workdir itself: steps after it would be mixed with those already "
                "there; choose another workdir"
            )
        if found is None:
            found = checkpoint_at(config.resume)
        else:
            notes.append(f"resume={config.resume} was followed before: this run's own checkpoint goes first")
    if found is None:
        return Start()
    path, manifest = found
    if isinstance(manifest.get("config"), Mapping):
        notes += compare(manifest["config"], config, path)
    return from_checkpoint(path, manifest, tuple(notes))


def checkpoint_at(path: str) -> tuple[str, dict[str, Any]]:
    """Returns the checkpoint that a path means, verified, with its manifest: a run's folder, its `checkpoints`, or one.

    Raises:
      UserError: there is none, or none that is whole.
    """
    path = path.rstrip("/") or path
    if storage.exists(storage.join(path, checkpoints.MANIFEST)):
        try:
            return path, checkpoints.verified(path)
        except ValueError as error:
            raise UserError(
                f"checkpoint {path} is damaged ({error}): name another; beside it are "
                f"{', '.join(name for name in storage.names(os.path.dirname(path)) if name.isdigit())}"
            ) from None
    for folder in (storage.join(path, "checkpoints"), path):
        if checkpoints.steps(folder):
            found = checkpoints.newest(folder)
            if found is None:
                raise UserError(f"none of the checkpoints in {folder} is whole: name another run")
            return found
    parent = os.path.dirname(path) or "."
    siblings = storage.names(parent) if storage.is_local(parent) else []
    name = os.path.basename(path)
    hint = "" if name in siblings else nearest(name, siblings)  # a file that is there is what it is
    beside = [other for other in siblings if other.isdigit()]
    if beside and not hint:
        hint = f" (beside it are {', '.join(beside)})"
    raise UserError(f"{path} is neither a run's folder nor a checkpoint{hint}: give a folder such as runs/digits")


def weights_at(path: str) -> str:
    """Returns the weight file that `init_from` means; one that is no run or checkpoint of ours stays as it is."""
    if "://" in path or not os.path.isdir(path):
        return path
    inside = os.listdir(path)
    several = any(os.path.exists(os.path.join(path, name, checkpoints.MANIFEST)) for name in inside if name.isdigit())
    if "checkpoints" not in inside and checkpoints.MANIFEST not in inside and not several:
        return path
    found, manifest = checkpoint_at(path)
    if manifest.get("format") == 1:
        return f"{storage.join(found, 'state.npz')}:parameters"
    return found


def category(key: str) -> str:
    """Returns "free", "shape" or "change" for a config key."""
    if any(key == name or (name.endswith(".") and key.startswith(name)) for name in FREE):
        return "free"
    return "shape" if key in SHAPE else "change"


def compare(before: Mapping[str, Any], config: Config, path: str) -> list[str]:
    """Returns the differences of a config to the one something was written with, as lines.

    Args:
      before: the old config as plain values; keys that this version does not know are left out.
      config: the new one.
      path: the workdir or checkpoint, for messages.

    Raises:
      UserError: the model has another shape, or something else changed without `allow_config_change`.
    """
    old = configs.from_dict(known(before), path)
    kinds: dict[str, list[str]] = {"free": [], "change": [], "shape": []}
    for line in configs.differences(old, config):
        kinds[category(line.split(":")[0])].append(line)
    if kinds["shape"]:
        raise UserError(
            f"{path} belongs to a run with another configuration ({'; '.join(kinds['shape'][:8])}): the state of "
            f"another model or optimizer cannot go on; choose another workdir and --init_from={path} for its weights"
        )
    if kinds["change"] and not config.allow_config_change:
        raise UserError(
            f"{path} belongs to a run with another configuration ({'; '.join(kinds['change'][:8])}): choose another "
            "workdir, or go on with these changes by --allow_config_change"
        )
    hidden = ("workdir", "resume", "allow_config_change")
    return [f"{line} (allowed)" for line in kinds["change"]] + [
        line for line in kinds["free"] if line.split(":")[0] not in hidden
    ]


def first_batch(start: Start, batch_size: int) -> tuple[int, list[str]]:
    """Returns the number of the next batch in the stream of batches of `batch_size`, and what there is to say.

    The position is counted in examples, so another batch size goes on where the old one stopped.
    """
    whole, rest = divmod(start.examples, batch_size)
    if not rest:
        return whole, []
    return whole + 1, [
        f"{start.examples:,} examples are no whole batches of {batch_size}: {batch_size - rest} are passed over"
    ]


def load(start: Start, model: Any, config: Config) -> Start:
    """Fills the model from the checkpoint of a start, if it has one; returns the start with what there is to say."""
    if start.path is None:
        return start
    notes = state.restore(model, start.path, start.manifest, change=config.allow_config_change)
    files = start.manifest.get("files", {}).values()
    size = sum(facts["bytes"] for facts in files) / 2**20
    loaded = f"{len(start.manifest['arrays'])} arrays, {size:,.1f} MiB, all matched, from {start.path}"
    return dataclasses.replace(start, notes=(loaded, *notes, *start.notes))


def known(before: Mapping[str, Any]) -> dict[str, Any]:
    top = {f.name for f in dataclasses.fields(Config)}
    known: dict[str, Any] = {}
    for name, value in before.items():
        if name in SECTIONS and isinstance(value, Mapping):
            fields = {f.name for f in dataclasses.fields(SECTIONS[name])}
            known[name] = {key: inner for key, inner in value.items() if key in fields}
        elif name in top:
            known[name] = value
    return known
