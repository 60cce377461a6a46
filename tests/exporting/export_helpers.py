"""A small model with weights that matter, and the server that tests talk to."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

import vit_tpu

SETTINGS = {"width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "image_size": 12, "num_classes": 4, "pool": "map"}
NAMES = ("ant", "bee", "cat", "dog")


def tiny(policy: str = "float32", **settings) -> vit_tpu.ViT:
    with vit_tpu.precision(policy):
        model = vit_tpu.ViT("Ti/4", **{**SETTINGS, **settings})
    random = np.random.default_rng(0)
    for parameter in model.parameters():
        shape = parameter.variable.shape
        fan_in = np.prod(shape[:-1]) if parameter.kind == "kernel" else 4.0
        parameter.variable.assign(random.normal(size=shape, scale=fan_in**-0.5).astype(np.float32))
    return model


def images(count: int = 6, size: tuple[int, int] = (12, 12), channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, *size, channels), np.uint8)


def floats(pixels: np.ndarray) -> np.ndarray:
    return pixels.astype(np.float32) / 127.5 - 1


@contextlib.contextmanager
def rest_server(folder: str, name: str = "vit") -> Iterator[str]:
    """Serves a SavedModel folder at the REST address and in the JSON format of TensorFlow Serving."""
    loaded = tf.saved_model.load(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == f"/v1/models/{name}:predict"
            run = loaded.signatures[asked.get("signature_name", "serving_default")]
            ((key, spec),) = run.structured_input_signature[1].items()
            values = [base64.b64decode(v["b64"]) if isinstance(v, dict) else v for v in asked["instances"]]
            outputs = run(**{key: tf.constant(values, spec.dtype)})
            rows = [{k: v.numpy()[i].tolist() for k, v in outputs.items()} for i in range(len(values))]
            body = json.dumps({"predictions": rows}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/models/{name}:predict"
    finally:
        server.shutdown()
        server.server_close()
