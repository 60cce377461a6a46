"""Files that are broken, or not weights, give one clear sentence and leave the model as it was."""

import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
from weights_helpers import build, same, values

from vit_tpu.errors import UserError
from vit_tpu.weights import load_weights, save_weights


@pytest.fixture(scope="module")
def model():
    return build(seed=0, pool="gap")


@pytest.fixture(scope="module")
def good(model, tmp_path_factory):
    """Returns the bytes of a good file by suffix."""
    folder = tmp_path_factory.mktemp("good")
    save_weights(model, str(folder / "x.npz"))
    save_weights(model, str(folder / "x.safetensors"), format="keras")
    return {suffix: (folder / f"x{suffix}").read_bytes() for suffix in (".npz", ".safetensors")}


def refused(path, match):
    model = build(seed=5, pool="gap")
    before = values(model)
    with pytest.raises(UserError, match=match) as caught:
        load_weights(model, str(path), verbose=False)
    assert "\n" not in str(caught.value) and str(path).split(":")[0] in str(caught.value)
    assert same(values(model), before)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_cut_short(model, good, tmp_path, suffix, share):
    data = good[suffix]
    (tmp_path / f"x{suffix}").write_bytes(data[: int(len(data) * share)])
    refused(tmp_path / f"x{suffix}", "broken or cut short.*get the file again")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_empty_and_foreign_bytes(model, tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"")
    refused(path, "is empty")
    path.write_bytes(b"<html>404</html>" * 10)
    refused(path, "is not a weight file")


def test_one_flipped_bit_in_an_npz_is_found_before_anything_changes(tmp_path):
    settings = {"pool": "gap", "width": 64, "mlp_dim": 256}  # tensors larger than the piece that opening a file reads
    model, other = build(seed=0, **settings), build(seed=5, **settings)
    save_weights(model, str(tmp_path / "x.npz"))
    data, before = bytearray((tmp_path / "x.npz").read_bytes()), values(other)
    data[data.index(values(model)["blocks/1/mlp/dense2/kernel"].tobytes()) + 60_000] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(UserError, match="damaged: the checksum of .*encoderblock_1/MlpBlock_0/Dense_1/kernel.npy"):
        load_weights(other, str(tmp_path / "x.npz"), verbose=False)
    assert same(values(other), before)


def test_pickles_are_never_loaded_whatever_their_name(model, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    (tmp_path / "x.npz").write_bytes(pickle.dumps(Evil()))
    refused(tmp_path / "x.npz", "pickle.*safetensors.torch.save_file")
    objects = np.array([Evil()], dtype=object)
    np.savez(tmp_path / "objects.npz", **{"Transformer/encoderblock_0/LayerNorm_0/scale": objects})
    refused(tmp_path / "objects.npz", "Python objects")
    with zipfile.ZipFile(tmp_path / "x.pth", "w") as archive:  # how torch.save writes
        archive.writestr("x/data.pkl", pickle.dumps(Evil()))
    refused(tmp_path / "x.pth", "pickle.*convert it where PyTorch is installed")
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    refused(folder, "pytorch_model.bin holds a pickle")
    assert not (tmp_path / "evil").exists()


def test_zip_that_is_no_npz(model, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(tmp_path / "x.npz", "is a zip but no .npz: it holds readme.txt")


def test_wrong_dtype_and_rank(model, good, tmp_path):
    (tmp_path / "good.npz").write_bytes(good[".npz"])
    arrays = dict(np.load(tmp_path / "good.npz"))
    np.savez(tmp_path / "x.npz", **arrays | {"head/bias": np.arange(5)})
    refused(tmp_path / "x.npz", "head/bias is int64, not floating-point")
    np.savez(tmp_path / "x.npz", **arrays | {"embedding/kernel": np.ones(5, np.float32)})
    refused(tmp_path / "x.npz", r"embedding/kernel \[5\] for \[4, 4, 3, 16\]")
    np.savez(tmp_path / "x.npz", **arrays | {"pos_embedding": np.ones((16, 16), np.float32)})
    refused(tmp_path / "x.npz", r"pos_embedding has shape \[16, 16\]")


def test_safetensors_header_that_lies(model, tmp_path):
    entry = {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}
    header = json.dumps({"blocks/0/norm1/scale": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    refused(tmp_path / "x.safetensors", "broken or cut short")


def test_missing_files_name_the_nearest(model, good, tmp_path):
    (tmp_path / "vit_b16.npz").write_bytes(good[".npz"])
    refused(tmp_path / "vit_b15.npz", 'did you mean ".*vit_b16.npz"')
    (tmp_path / "other.npz").write_bytes(good[".npz"])
    refused(tmp_path, "does not hold one weight file.*2 .*name it")


def test_shards_are_read_as_one_file_and_a_lost_one_is_named(model, good, tmp_path):
    from safetensors.numpy import load_file, save_file

    (tmp_path / "whole.safetensors").write_bytes(good[".safetensors"])
    arrays = load_file(tmp_path / "whole.safetensors")
    (tmp_path / "whole.safetensors").unlink()
    names = sorted(arrays)
    places = {name: f"model-{1 + i % 2}-of-2.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: arrays[name] for name in names if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    other = build(pool="gap")
    report = load_weights(other, str(tmp_path), verbose=False)
    assert same(values(other), values(model))
    assert report.bytes == sum((tmp_path / file).stat().st_size for file in set(places.values()))
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(UserError, match="names the shard model-2-of-2.safetensors, which is not beside it"):
        load_weights(other, str(tmp_path), verbose=False)


def test_a_failed_save_leaves_the_old_file_and_no_rubbish(model, good, tmp_path, monkeypatch):
    from vit_tpu.weights import write

    path = tmp_path / "x.npz"
    path.write_bytes(good[".npz"])

    def full(stream, tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "_rows", full)
    with pytest.raises(UserError, match="cannot be written .No space left"):
        save_weights(model, str(path))
    assert path.read_bytes() == good[".npz"] and os.listdir(tmp_path) == ["x.npz"]


def test_equal_weights_give_equal_files(model, good, tmp_path):
    for suffix, format_ in ((".npz", "big_vision"), (".safetensors", "keras")):
        save_weights(model, str(tmp_path / f"x{suffix}"), format=format_)
        assert (tmp_path / f"x{suffix}").read_bytes() == good[suffix]
