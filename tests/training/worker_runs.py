"""Runs of `vit_tpu.train` in several processes on this machine, always with a time limit and always ended."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 300  # seconds for anything


def free_ports(count):
    """Returns ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            place = stack.enter_context(socket.socket())
            place.bind(("127.0.0.1", 0))
            found.append(place.getsockname()[1])
        return found


def documented():
    """The two commands that docs/multi_host.md shows for one machine, as lists of words."""
    lines = (ROOT / "docs" / "multi_host.md").read_text().splitlines()
    return [
        line.rstrip("& ").split() for line in lines if line.startswith("python -m vit_tpu.train --workers=localhost")
    ]


class Workers:
    """The processes of the documented commands, with another folder, free ports and more arguments."""

    def __init__(self, folder, arguments):
        commands = documented()
        addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(len(commands)))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        self.folder, self.processes, self.outputs = pathlib.Path(folder), [], []
        other = {"python": sys.executable, "--workers": f"--workers={addresses}", "--workdir": f"--workdir={folder}"}
        for index, command in enumerate(commands):
            self.outputs.append(self.folder.parent / f"{self.folder.name}-{time.monotonic_ns()}-worker-{index}.txt")
            words = [other.get(word.partition("=")[0], word) for word in command]
            with open(self.outputs[-1], "w") as output:
                self.processes.append(
                    subprocess.Popen([*words, *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT,
                                     cwd=ROOT)
                )  # fmt: skip

    def wait_for_step(self, step):
        """Returns when metrics.jsonl has reached a step."""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until and all(process.poll() is None for process in self.processes):
            if any(line["step"] >= step for line in lines(self.folder)):
                return
            time.sleep(0.02)
        raise AssertionError(f"step {step} was not reached\n{self.said()}")

    def send(self, worker, number):
        self.processes[worker].send_signal(number)

    def codes(self):
        """Returns the exit codes once all have ended."""
        until = time.monotonic() + LIMIT
        for process in self.processes:
            process.wait(max(until - time.monotonic(), 1))
        return [process.returncode for process in self.processes]

    def said(self, worker=None):
        chosen = self.outputs if worker is None else [self.outputs[worker]]
        return "\n".join(output.read_text() for output in chosen)


@contextlib.contextmanager
def workers(folder, *arguments):
    run = Workers(folder, arguments)
    try:
        yield run
    finally:
        for process in run.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def lines(folder):
    path = pathlib.Path(folder) / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found
