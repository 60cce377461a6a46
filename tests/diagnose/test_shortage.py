"""Out-of-memory errors in the words of each library: read, told with layers and savings, and told apart from others."""

import pytest
import tensorflow as tf

import vit_tpu
from vit_tpu.diagnose import oom, shortage

GIB = 2**30
# The texts of TensorFlow 2.20, its XLA, libtpu 0.0.52, NumPy 2 and Python, as their programs hold them, with figures.
TPU_COMPILE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 51.95G of 15.48G "
    "hbm. Exceeded hbm capacity by 36.47G.\n\nTotal hbm usage >= 52.47G:\n    reserved        530.00M"
)
TPU_ALLOCATE = (
    "RESOURCE_EXHAUSTED: Attempting to allocate 4.50G. That was not possible. There are 2.14G free.; (0x0x0_HBM0)"
)
TPU_RESERVE = (
    "RESOURCE_EXHAUSTED: Attempting to reserve 12.21G at the bottom of memory. That was not possible. There are 8.00G "
    "free, 0B reserved, and 5.29G reservable."
)
TPU_TEMPORARIES = (
    "Ran out of memory on HBM, the total memory required for HLO temporaries (20.10G) exceeds available HBM (15.48G). "
    "HLO module: a_inference_train_function"
)
GPU_TENSOR = (
    "OOM when allocating tensor with shape[512,12,197,197] and type half on /job:localhost/replica:0/task:0/device:"
    "GPU:0 by allocator GPU_0_bfc\n\t [[{{node vit/blocks/3/attention/softmax/Softmax}}]]\nHint: If you want to see a "
    "list of allocated tensors when OOM happens, add report_tensor_allocations_upon_oom to RunOptions"
)
GPU_XLA = "Out of memory while trying to allocate 4770354232 bytes.\n\t [[{{node StatefulPartitionedCall}}]]"
XLA = "Out of memory allocating 36700160000 bytes."
CUDA = "Failed to allocate request for 4.44GiB (4767482880B) on device ordinal 0"
CPU_TENSOR = (
    "OOM when allocating tensor with shape[64,3136,3136] and type float on /job:localhost/replica:0/task:0/device:"
    "CPU:0 by allocator cpu [Op:BatchMatMulV2]"
)
NUMPY = "Unable to allocate 3.00 GiB for an array with shape (64, 224, 224, 3) and data type float32"

TEXTS = [
    (TPU_COMPILE, {"place": "TPU", "program": round(51.95 * GIB), "there": round(15.48 * GIB)}),
    (TPU_TEMPORARIES, {"place": "TPU", "program": round(20.10 * GIB), "there": round(15.48 * GIB)}),
    (TPU_ALLOCATE, {"place": "TPU", "asked": round(4.5 * GIB), "free": round(2.14 * GIB)}),
    (TPU_RESERVE, {"place": "TPU", "asked": round(12.21 * GIB), "free": 8 * GIB}),
    (GPU_TENSOR, {"place": "GPU", "asked": 2 * 512 * 12 * 197 * 197, "array": "float16[512, 12, 197, 197]",
                  "layer": "vit/blocks/3/attention/softmax/Softmax"}),
    (GPU_XLA, {"asked": 4770354232, "layer": "StatefulPartitionedCall"}),
    (XLA, {"asked": 36700160000}),
    (CUDA, {"place": "GPU", "asked": 4767482880}),
    (CPU_TENSOR, {"place": "CPU", "asked": 4 * 64 * 3136 * 3136, "array": "float32[64, 3136, 3136]",
                  "layer": "BatchMatMulV2"}),
    (NUMPY, {"place": "CPU", "asked": 3 * GIB, "array": "float32[64, 224, 224, 3]"}),
    ("std::bad_alloc", {"place": "CPU"}),
    ("failed to allocate memory [Op:AddV2]", {"layer": "AddV2"}),
    ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", {"place": "GPU"}),
]  # fmt: skip


@pytest.mark.parametrize("text, wanted", TEXTS, ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_each_librarys_words_are_understood(text, wanted):
    assert shortage.parse(text) == shortage.Shortage(**wanted)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shapes (3, 4) and (5, 6) do not match"),
        tf.errors.ResourceExhaustedError(None, None, "/data/x.tfrecord; No space left on device"),
        tf.errors.ResourceExhaustedError(None, None, "Too many open files"),
        tf.errors.ResourceExhaustedError(None, None, "Received message larger than max (5242880 vs. 4194304)"),
        tf.errors.ResourceExhaustedError(None, None, "HTTP 429: quota exceeded for bucket reads"),
        tf.errors.ResourceExhaustedError(None, None, "gs://b/x: ran out of retries (rate limit exceeded)"),
        FileNotFoundError("/memory/out"),
    ],
)
def test_other_errors_stay_what_they_are(error):
    assert shortage.read(error) is None and oom.message(error, vit_tpu.Config()) is None


def test_the_cause_of_an_error_counts():
    try:
        try:
            raise MemoryError()
        except MemoryError as inner:
            raise RuntimeError("the pipeline stopped") from inner
    except RuntimeError as error:
        assert shortage.read(error) == shortage.Shortage(place="CPU")
    found = shortage.read(
        tf.errors.UnknownError(None, None, f"MemoryError: {NUMPY}\nTraceback (most recent call last)")
    )
    assert found.asked == 3 * GIB


BIG = {
    "mixup": 0.0, "training.ema": None, "evaluate_ema": False, "data.source": "synthetic", "model.num_classes": 1000,
    **dict.fromkeys(("model.width", "model.depth", "model.mlp_dim", "model.num_heads")), "model.image_size": 224,
    "model.variant": "B/16", "batch_size": 512,
}  # fmt: skip


def test_message_says_what_was_asked_what_there_is_what_is_large_and_what_to_change():
    config = vit_tpu.load_config(None, BIG)
    text = oom.message(RuntimeError(TPU_COMPILE), config, hardware="TPU", kept="the checkpoint of step 1,200 is whole")
    lines = text.splitlines()
    assert lines[0] == "out of memory on the TPU"
    assert lines[1] == "  the compiled step needs 51.95 GiB; the device has 15.48 GiB"
    assert any("blocks/*/mlp: 12 x before GELU float32[512, 196, 3072]" in line for line in lines)
    changes = [line.split("=")[0].split(".")[-1].strip() for line in lines if "saves" in line]
    assert changes[:3] == ["precision", "accumulation_steps", "remat"] and "batch_size" in changes
    # Predictions are scaled to what the compiler said: half precision leaves about half.
    half = next(line for line in lines if "precision=" in line)
    assert 26 < float(half.split("leaves ")[1].split()[0]) < 28 and "enough" not in half
    assert "enough" in next(line for line in lines if "accumulation_steps=4" in line)
    assert lines[-2].startswith("    together: precision=mixed_bfloat16 ") and lines[-2].endswith("enough")
    assert lines[-1] == "  the checkpoint of step 1,200 is whole"


def test_message_without_a_size_still_says_what_is_large():
    text = oom.message(MemoryError(), vit_tpu.load_config(None, {**BIG, "batch_size": 8}), hardware="CPU")
    assert text.startswith(
        "out of memory on the host\n  an allocation failed; its size is not known; this process may have "
    )
    assert "the largest arrays:" in text and "optimizer.name=adafactor" in text


def test_memory_that_is_too_small_is_said_before_the_first_step(monkeypatch):
    config = vit_tpu.load_config(None, BIG)
    monkeypatch.setattr(shortage, "of_device", lambda kind: 8 * GIB)
    lines = oom.warning(config, hardware="CPU")
    assert lines[0].startswith("warning: a step needs about ") and "this process may have 8.00 GiB" in lines[0]
    assert any("training.accumulation_steps=" in line and "enough" in line for line in lines)
    monkeypatch.setattr(shortage, "of_device", lambda kind: 2**50)
    assert oom.warning(config, hardware="CPU") == []
    monkeypatch.setattr(shortage, "of_device", lambda kind: None)
    assert oom.warning(config, hardware="TPU") == []


def test_limits_of_the_process_count_as_its_memory():
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    whole = shortage.of_host()
    assert whole > GIB
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2**46, before[1]))  # far more than there is
        assert shortage.of_host() == whole
        resource.setrlimit(resource.RLIMIT_AS, (whole - 4096, before[1]))
        assert shortage.of_host() == whole - 4096
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
