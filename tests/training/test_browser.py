"""TensorBoard in a real headless browser shows what a run with everything on has left.

Screenshots go to pytest's folder for the test (`--basetemp=DIR` chooses it); their place is printed with `-rA`.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import chromium
import pytest
from full_run import full_run

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="no browser: install chromium or Google Chrome")

# xprof's page loads Google's charts from the internet before anything of its own, and stays blank without them. Here
# it gets something that draws no chart; all text of the page is its own.
NO_CHARTS = "window.google = {charts: {load() {}, safeLoad() {}, setOnLoadCallback() {}}, visualization: {}};"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def tensorboard():
    """The address of a TensorBoard on the run's logs."""
    logs, port = full_run()[0] / "logs", free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logs, "--port", str(port), "--load_fast=false"]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address, end = f"http://127.0.0.1:{port}/", time.monotonic() + 120
        while True:
            assert server.poll() is None, "TensorBoard ended"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}data/plugins_listing", timeout=60).read()
                break
            assert time.monotonic() < end, "TensorBoard does not answer"
            time.sleep(0.3)
        yield address
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def page(tensorboard, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    browser = chromium.Browser(folder / "profile", {"/charts/loader.js": NO_CHARTS})

    def show(tab, *words, enough=("body", "true", 1)):
        """Opens a tab, waits until it shows the words and enough of some elements, and returns its text."""
        browser.open(f"{tensorboard}#{tab}")
        selector, condition, count = enough

        def lacks():
            text = browser.text()
            return [word for word in words if word not in text] + (
                [f"{count} {selector}"] if browser.count(selector, condition) < count else []
            )

        browser.until(lambda: not lacks(), 40)
        browser.screenshot(folder / f"{tab}.png")
        print(f"screenshot: {folder / f'{tab}.png'}")
        assert not lacks(), f"{tab} does not show {lacks()}, but: {browser.text()}"
        return browser.text()

    browser.show = show
    try:
        yield browser
    finally:
        browser.close()


# Curves and histograms are drawn as paths of many points, in no element that says what it is.
CURVE = "e.checkVisibility() && (e.getAttribute('d') || '').length > 100"
PICTURE = "e.checkVisibility() && e.naturalWidth > 50"


def test_scalars_show_curves_and_have_all_kinds(page):
    text = page.show(
        "scalars", "accuracy", "grad_norm", "images_per_second", "learning_rate", "loss", "mfu", "update_ratio",
        "trust_ratio", "attention", "memory", "time", "skipped_updates", enough=("path", CURVE, 2),
    )  # fmt: skip
    assert "train" in text and "validation" in text


def test_images_show_filters_positions_and_predictions(page):
    page.show("images", "pictures/patch_filters", "pictures/positions", "pictures/validation", "step\n64",
              enough=("img", PICTURE, 3))  # fmt: skip


def test_histograms_show_the_weights(page):
    page.show("histograms", "weights", "weights/blocks/0/attention/key/kernel", enough=("path", CURVE, 8))


def test_profile_shows_how_long_an_execution_took(page):
    text = page.show("profile", "Performance Summary", "Host Compute Time", "Number of Hosts used")
    lines = text.split("\n")
    host = next(line for line in lines[lines.index("Host Compute Time") :] if line.endswith("ms"))
    assert float(host.split()[0]) > 1, host  # nothing where no execution is marked
    assert "No step time measured" not in text


def test_hyper_parameters_stand_beside_the_results(page):
    text = page.show("hparams", "optimizer.name", "lamb", "validation accuracy", "validation loss", "train loss")
    result = json.loads((full_run()[0] / "summary.json").read_text())["validation"]["accuracy"]
    assert f"{result:.4f}"[:5] in text.split("train loss")[-1]


def test_text_shows_the_config(page):
    page.show("text", "config", "training:", "board: full")
