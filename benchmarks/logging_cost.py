"""What logging costs: the same steps without any, with the default, and with everything, in turns of one process.

Trains one ViT on the digits and takes turns over a few hundred steps each: no log, the default lines of metrics.jsonl
and TensorBoard, `board=watch` (update ratios, trust ratios, attention logits) and `board=full` (histograms and
pictures, too). Every turn takes the same number of steps with the same interval between lines as the digits run has,
and the order of the turns changes from round to round. Costs are ratios within one process: of the tenth-fastest part
of the executions, and of the mean for `full`, whose pictures fall on few of them. The CPU time that Python takes for a
line, as a share of the steps between two lines, is given as well: other programs change it least.

  python benchmarks/logging_cost.py
  python benchmarks/logging_cost.py --width=192 --depth=12 --batch_size=256 --json=cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

KINDS = ("none", "scalars", "watch", "full")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=132, help="of a turn")
    parser.add_argument("--each", type=int, default=11, help="steps per execution, and between two lines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    result = measure(options)
    print(f"  {'board':<10}{'step ms':>10}{'cost':>9}{'a line, CPU ms':>17}{'share of the steps':>21}")
    for kind, row in result["kinds"].items():
        figures = f"{row['step_ms']:>10.3f}{row['cost']:>9.2%}{row['line_cpu_ms']:>17.3f}{row['line_share']:>21.2%}"
        print(f"  {kind:<10}{figures}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns for each kind of logging the median step, its cost over none, and the CPU time of a line."""
    import vit_tpu
    from vit_tpu import devices
    from vit_tpu.data.broken import BrokenRecords
    from vit_tpu.models.guard import StepGuard
    from vit_tpu.training import board, build, gauges, inputs, schedule
    from vit_tpu.training.logger import Logger

    class Timed(StepGuard):
        """Notes the time between the ends of executions, all callbacks between them included; the last in the list."""

        def __init__(self) -> None:
            super().__init__(every=2**62)
            self.seconds: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.last = None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if logs is not None:
                float(logs["step_loss"])
            now = time.perf_counter()
            if self.last is not None:
                self.seconds.append(now - self.last)
            self.last = now

    def prepare(kind: str) -> dict[str, Any]:
        changes = {
            "training.board": "scalars" if kind == "none" else kind, "width": options.width, "depth": options.depth,
            "mlp_dim": 4 * options.width, "batch_size": options.batch_size, "optimizer.name": "lamb",
            "steps_per_execution": options.each, "training.epochs": None, "training.steps": 10 * options.steps,
        }  # fmt: skip
        config = vit_tpu.load_config(None, changes)
        train = inputs.ready(config, inputs.open_source(config, "train"), BrokenRecords(0))
        validation = inputs.ready(config, inputs.open_source(config, "validation"), BrokenRecords(0))
        plan = schedule.plan(config, train.num_examples)
        model = build.build_model(config, devices.choose("cpu"), 10, 1, plan)
        timed, watchers, folder = Timed(), [], tempfile.mkdtemp(prefix="logging_cost_")
        if kind != "none":
            logger = Logger(
                folder, options.each, batch_size=options.batch_size, total_steps=10 * options.steps, peak=1e12,
                gauges=gauges.of_run(config, model, validation, print, None),
            )  # fmt: skip
            logger.follows, lines = True, []
            spy(logger, lines)
            watchers.append(logger)
            if kind == "full":
                samples = board.Samples(*inputs.sample(config, validation, 64), validation.class_names)
                # As in a run of twenty evaluations, with pictures four times.
                drawer = board.Board(logger, options.steps // 2, samples, total_steps=5 * options.steps)
                drawer.follows = True
                watchers.append(drawer)
        else:
            lines = []
        data = inputs.train_data(config, train, 0, BrokenRecords(0))
        model.fit(data, steps_per_epoch=2 * options.each, epochs=1, verbose=0, callbacks=[*watchers, timed])  # compiles
        timed.seconds.clear()
        lines.clear()
        return {"model": model, "data": data, "watchers": watchers, "timed": timed, "lines": lines}

    def spy(logger: Any, lines: list[float]) -> None:
        write = logger.on_steps

        def on_steps(step: int, logs: Any) -> None:
            before = time.thread_time()
            write(step, logs)
            lines.append(time.thread_time() - before)

        logger.on_steps = on_steps

    parts = {kind: prepare(kind) for kind in KINDS}
    for turn in range(options.rounds):
        for kind in KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]:
            part = parts[kind]
            part["model"].fit(
                part["data"], steps_per_epoch=options.steps, epochs=1, verbose=0,
                callbacks=[*part["watchers"], part["timed"]],
            )  # fmt: skip
    kinds: dict[str, Any] = {}
    for kind, part in parts.items():
        seconds, lines = part["timed"].seconds, part["lines"] or [0.0]
        # One execution in ten is faster: what other programs on the machine took is not in it. Histograms and pictures
        # fall on few executions, so what everything costs is the mean's to say.
        fast = statistics.quantiles(seconds, n=10)[0]
        mean = statistics.mean(seconds)
        kinds[kind] = {"fast": fast, "mean": mean, "line_cpu_ms": 1e3 * statistics.median(lines)}
    none = dict(kinds["none"])
    for kind, row in kinds.items():
        which = "mean" if kind == "full" else "fast"
        row["step_ms"] = 1e3 * row[which] / options.each
        row["cost"] = row[which] / none[which] - 1
        row["line_share"] = row["line_cpu_ms"] / (1e3 * none["fast"])
    return {"options": {k: v for k, v in vars(options).items() if k != "json"}, "kinds": kinds}


if __name__ == "__main__":
    sys.exit(main())
