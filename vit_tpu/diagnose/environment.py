"""Checks of what is installed and of the devices."""

from __future__ import annotations

import time
from collections.abc import Iterator

from vit_tpu import precision
from vit_tpu.diagnose.findings import Finding
from vit_tpu.diagnose.machine import Machine

TESTED = {"tensorflow": "2.20", "tf_keras": "2.20", "tf-models-official": "2.20"}
INSTALL = "pip install -c constraints.txt ."


def check(machine: Machine, policy: str | None = None) -> list[Finding]:
    """Returns findings on Python, packages, devices, precision, XLA and the clock.

    Args:
      machine: from `machine.look()`.
      policy: the precision a run will use; None: the recommended one.
    """
    findings = [*_versions(machine), *_profiler(machine), *_addons(machine), *_devices(machine)]
    return [*findings, *_precision(machine, policy), *_xla(machine), *_clock(machine)]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _versions(machine: Machine) -> Iterator[Finding]:
    here = ".".join(map(str, machine.python))
    if not (3, 10) <= machine.python < (3, 13):
        yield Finding(
            "error", "python", f"Python {here}", "use Python 3.10, 3.11 or 3.12: TensorFlow 2.20 has no other"
        )
    good = True
    for name, wanted in TESTED.items():
        found = machine.packages.get(name)
        if name == "tensorflow" and found is None:
            found = machine.packages.get("tensorflow-tpu")
        if found is None:
            good = False
            yield Finding("error", "versions", f"{name} is not installed", INSTALL)
        elif _minor(found) != wanted:
            good = False
            yield Finding("error", "versions", f"{name} {found}; this package works with {wanted}", INSTALL)
    tensorboard, tensorflow = machine.packages.get("tensorboard"), machine.packages.get("tensorflow")
    if tensorboard and tensorflow and _minor(tensorboard) != _minor(tensorflow):
        good = False
        yield Finding(
            "warning", "versions", f"tensorboard {tensorboard} beside tensorflow {tensorflow} may not start",
            f"pip install 'tensorboard=={_minor(tensorflow)}.*'",
        )  # fmt: skip
    if good:
        named = ", ".join(f"{name} {machine.packages[name]}" for name in TESTED if machine.packages.get(name))
        yield Finding("ok", "versions", f"Python {here}, {named}")


def _profiler(machine: Machine) -> Iterator[Finding]:
    setuptools = machine.packages.get("setuptools")
    if setuptools is None or _numbers(setuptools) >= (81, 0):
        yield Finding(
            "error", "tensorboard", f"TensorBoard does not start beside setuptools {setuptools} (no pkg_resources)",
            "pip install 'setuptools<81'",
        )  # fmt: skip
    found = machine.packages.get("tensorboard-plugin-profile")
    if found is None:
        yield Finding(
            "error", "profiler", "tensorboard-plugin-profile is not installed: TensorBoard will show no Profile tab",
            "pip install tensorboard-plugin-profile",
        )  # fmt: skip
    elif _numbers(found) < (2, 19):
        yield Finding(
            "error", "profiler", f"tensorboard-plugin-profile {found} cannot read traces of TensorFlow 2.20",
            "pip install 'tensorboard-plugin-profile>=2.19'",
        )  # fmt: skip
    else:
        yield Finding("ok", "profiler", f"tensorboard-plugin-profile {found}")


def _addons(machine: Machine) -> Iterator[Finding]:
    typeguard = machine.packages.get("typeguard")
    if machine.packages.get("tensorflow-addons") and typeguard and int(typeguard.split(".")[0]) >= 3:
        yield Finding(
            "warning", "addons", f"tensorflow-addons cannot be imported beside typeguard {typeguard}",
            "pip install 'typeguard<3' (only needed to compare with Addons' LAMB)",
        )  # fmt: skip


def _devices(machine: Machine) -> Iterator[Finding]:
    if machine.tpus:
        yield Finding("ok", "devices", f"{machine.tpus} TPU cores")
    elif machine.gpus:
        names = ", ".join(gpu.name for gpu in machine.gpus)
        yield Finding("ok", "devices", f"{len(machine.gpus)} GPU(s): {names}")
    elif machine.nvidia_files:
        yield Finding(
            "error", "devices", f"an NVIDIA driver ({', '.join(machine.nvidia_files)}), but TensorFlow sees no GPU",
            "pip install 'tensorflow[and-cuda]==2.20.*', and check CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    else:
        yield Finding("ok", "devices", f"no GPU or TPU: a CPU of {machine.cores} cores")
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1") and machine.nvidia_files:
        yield Finding(
            "warning", "devices", f'CUDA_VISIBLE_DEVICES="{hidden}" hides all GPUs', "unset CUDA_VISIBLE_DEVICES"
        )


def _precision(machine: Machine, policy: str | None) -> Iterator[Finding]:
    if machine.tpus:
        best, why = "mixed_bfloat16", "TPU matrix units multiply bfloat16 natively"
    elif machine.gpus:
        best, why = precision.for_gpu(machine.gpus[0].capability)
    else:
        best, why = precision.for_cpu(machine.cpu_flags)
    if policy is None or policy == best:
        yield Finding("ok", "precision", f"{best}: {why}")
    elif policy == "float32" and not machine.gpus and not machine.tpus:
        yield Finding("ok", "precision", f"float32; {why}")
    elif policy == "float32":
        yield Finding("note", "precision", f"float32 is what will run; {best} would be faster here: {why}")
    elif best == "float32":
        yield Finding("warning", "precision", f"{policy} gains nothing here: {why}", "precision=float32")
    elif policy == "mixed_bfloat16":
        yield Finding("warning", "precision", f"mixed_bfloat16 has no tensor cores here: {why}", f"precision={best}")
    else:
        yield Finding(
            "warning", "precision", f"mixed_float16 needs loss scaling that {best} does without: {why}",
            f"precision={best}",
        )  # fmt: skip


def _xla(machine: Machine) -> Iterator[Finding]:
    if machine.xla_error:
        cure = "unset XLA_FLAGS and TF_XLA_FLAGS, then reinstall tensorflow; until then train with --nojit"
        yield Finding("error", "xla", f"a small function does not compile: {machine.xla_error}", cure)
    else:
        yield Finding("ok", "xla", "compiles, and its program is what runs")
    flags = machine.environment.get("TF_XLA_FLAGS", "")
    if "auto_jit" in flags:
        text = f"TF_XLA_FLAGS={flags} compiles pieces of graphs, the step's too"
        yield Finding("warning", "xla", text, "unset TF_XLA_FLAGS and use --jit")
    if machine.environment.get("TF_DISABLE_MKL") == "1" or machine.environment.get("TF_ENABLE_ONEDNN_OPTS") == "0":
        yield Finding("note", "xla", "oneDNN is switched off by the environment: CPU kernels are TensorFlow's own")


def _clock(machine: Machine) -> Iterator[Finding]:
    if machine.newest_file > machine.now + 60:
        late = (machine.newest_file - machine.now) / 3600
        yield Finding(
            "error", "clock", f"this machine's clock is at least {late:.1f} hours behind its own files: TensorBoard "
            "would sort runs wrongly and TLS certificates may be refused", "set the clock (timedatectl set-ntp true)",
        )  # fmt: skip
    else:
        yield Finding("ok", "clock", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(machine.now)))
