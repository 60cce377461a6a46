"""Makes and uses the PyTorch references of tests/weights: timm 1.0.31, transformers 5.24.0, torch 2.14.1, on a CPU.

Needs `pip install torch timm transformers`, which the tests do not:

    python make_references.py make            # rewrites the .safetensors, .npz and .json files beside this one
    python make_references.py check FOLDER    # runs models that vit_tpu exported (tests/weights/test_torch_live.py)

Every model is tiny (width 16, 2 blocks, 2 heads, 16x16 images, patch 4) and all its numbers are random.
"""

import json
import pathlib
import sys

import numpy as np
import safetensors.torch
import timm
import torch
import transformers
from timm.models.vision_transformer import VisionTransformer

HERE = pathlib.Path(__file__).parent
SIZES = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "num_classes": 5,
}
TIMM = {
    "timm_tok": {},
    "timm_avg_fc_norm": {"global_pool": "avg"},
    "timm_avg": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "timm_map": {"global_pool": "map", "class_token": False, "act_layer": "gelu_tanh"},
    "timm_registers": {"reg_tokens": 3, "no_embed_class": True, "init_values": 0.1},
    "timm_registers_embedded": {"reg_tokens": 3, "init_values": 0.1},
    "timm_no_qkv_bias": {"qkv_bias": False},
    "timm_map_registers_fc_norm": {"global_pool": "map", "class_token": False, "reg_tokens": 2, "fc_norm": True},
}
HF = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
LABELS = {"id2label": {str(i): str(i) for i in range(5)}, "label2id": {str(i): i for i in range(5)}}
WIDE = {**HF, "intermediate_size": 32}
CASES = {
    "hf_vit_classifier": ("ViTForImageClassification", "ViTConfig", {**WIDE, **LABELS}),
    "hf_vit_pooler": ("ViTModel", "ViTConfig", WIDE),
    "hf_vit_no_qkv_bias": ("ViTForImageClassification", "ViTConfig", {**WIDE, **LABELS, "qkv_bias": False}),
    "hf_dinov2": ("Dinov2Model", "Dinov2Config", {**HF, "mlp_ratio": 2}),
    "hf_dinov2_registers": (
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {**HF, "mlp_ratio": 2, "num_register_tokens": 3},
    ),
    "hf_siglip": ("SiglipVisionModel", "SiglipVisionConfig", WIDE),
}  # fmt: skip


def randomize(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
            if "norm" in name and name.endswith("weight"):
                p.add_(1.0)
    return model.eval()


def output(model, images):
    """Logits, or what stands for features: pooled output if there is one, else the class token."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    with torch.no_grad():
        if isinstance(model, VisionTransformer):
            return model(x).numpy()
        out = model(pixel_values=x)
    if getattr(out, "logits", None) is not None:
        return out.logits.numpy()
    if getattr(out, "pooler_output", None) is not None:
        return out.pooler_output.numpy()
    return out.last_hidden_state[:, 0].numpy()


def tokens(model, images):
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    with torch.no_grad():
        if isinstance(model, VisionTransformer):
            return model.forward_features(x).numpy()
        return model.base_model(pixel_values=x).last_hidden_state.numpy()


def make():
    images = np.random.default_rng(0).uniform(-1, 1, (3, 16, 16, 3)).astype(np.float32)
    outputs, configs = {"images": images}, {}
    for seed, (name, args) in enumerate(TIMM.items()):
        model = randomize(VisionTransformer(**SIZES, **args), seed)
        safetensors.torch.save_file(model.state_dict(), HERE / f"{name}.safetensors")
        outputs[name] = output(model, images)
        configs[name] = {
            "architecture": "vit_base_patch16_224",
            "global_pool": model.global_pool,
            "model_args": {**SIZES, **args},
        }
    for seed, (name, (cls, config, args)) in enumerate(CASES.items()):
        model = randomize(getattr(transformers, cls)(getattr(transformers, config)(**args)), 100 + seed)
        model.save_pretrained(HERE / "tmp")
        (HERE / "tmp" / "model.safetensors").rename(HERE / f"{name}.safetensors")
        configs[name] = json.loads((HERE / "tmp" / "config.json").read_text())
        (HERE / "tmp" / "config.json").unlink()
        (HERE / "tmp").rmdir()
        outputs[name] = output(model, images)
    np.savez(HERE / "torch_outputs.npz", **outputs, **kernels(), **maps())
    (HERE / "torch_cases.json").write_text(json.dumps(configs, indent=1) + "\n")


def kernels():
    """Position tables resized by the two libraries: 4x4 to 6x6, 7x7 to 3x5, 6x6 to 6x6 for a constant."""
    found = {}
    for old, new in (((4, 4), (6, 6)), ((7, 7), (3, 5)), ((5, 5), (12, 4))):
        table = np.random.default_rng(old[0]).normal(size=(1, old[0] * old[1], 8)).astype(np.float32)
        key = f"resize/{old[0]}x{old[1]}to{new[0]}x{new[1]}"
        found[f"{key}/table"] = table
        grid = torch.from_numpy(table).reshape(1, *old, 8).permute(0, 3, 1, 2)
        plain = torch.nn.functional.interpolate(grid, size=new, mode="bicubic", align_corners=False)
        found[f"{key}/bicubic"] = plain.permute(0, 2, 3, 1).reshape(1, -1, 8).numpy()
        resized = timm.layers.resample_abs_pos_embed(torch.from_numpy(table), new, old, num_prefix_tokens=0)
        found[f"{key}/bicubic_antialias"] = resized.numpy()
    return found


def maps():
    """Patch kernels resized by timm's pseudo-inverse with the bilinear kernel that FlexiViT uses."""
    kernel = np.random.default_rng(1).normal(size=(8, 3, 4, 4)).astype(np.float32)
    found = {"patch/kernel": kernel}
    for size in (6, 8):
        resized = timm.layers.resample_patch_embed(torch.from_numpy(kernel), [size, size], "bilinear", antialias=False)
        found[f"patch/{size}"] = resized.numpy()
    return found


def check(folder):
    """Runs every exported model below a folder and prints the largest difference from vit_tpu's output as JSON."""
    differences = {}
    for case in sorted(pathlib.Path(folder).iterdir()):
        config = json.loads((case / "config.json").read_text())
        if "model_args" in config:
            model = timm.create_model(f"local-dir:{case}", pretrained=True).eval()
        else:
            cls = getattr(transformers, config["architectures"][0])
            model, info = cls.from_pretrained(case, output_loading_info=True)
            wrong = [n for key in ("missing_keys", "unexpected_keys") for n in info[key] if not n.startswith("pooler.")]
            assert not wrong, (case.name, wrong)
            model = model.eval()
        expected = np.load(case / "expected.npz")
        images = expected["images"]
        got = tokens(model, images) if "tokens" in expected.files else output(model, images)
        want = expected["tokens"] if "tokens" in expected.files else expected["output"]
        differences[case.name] = float(np.abs(got - want).max())
    print(json.dumps(differences))


if __name__ == "__main__":
    make() if sys.argv[1] == "make" else check(sys.argv[2])
