"""The checks of the stand-in on a real ComfyUI: tiny random models of its own classes, on the CPU.

    python comfyui/tests/real.py --comfyui PATH [--server] [--seeds 8]

PATH is a checkout of ComfyUI whose requirements are installed beside residua. Without torchvision and
torchaudio stand-ins take their place; one that was built for another torch must go. `--server` also starts
ComfyUI, with the node package linked into custom_nodes, and sends it a prompt. `--seeds` also counts in how
many runs the own rounding of the host, which differs between split and batched guidance, tips a choice.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", required=True, type=Path)
    parser.add_argument("--models", default="", help="comma separated; default: all")
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--port", type=int, default=8199)
    return parser.parse_args()


# ComfyUI imports these for parts that no check uses. If they are missing (torchvision has no CPU build for
# every torch), stand-ins are enough: any name can be imported, and only `resize` of a mask is called.
STAND_INS = {
    "torchvision/__init__.py": "from . import models, transforms",
    "torchvision/ops.py": "def __getattr__(name): return object",
    "torchvision/models.py": "def __getattr__(name): return object",
    "torchvision/transforms/__init__.py": "from . import functional\ndef __getattr__(name): return object",
    "torchvision/transforms/functional.py": "import torch\n"
    "def resize(x, size, **_): return torch.nn.functional.interpolate(x, list(size))\n"
    "def __getattr__(name): return object",
    "torchaudio/__init__.py": "from . import functional, transforms\ndef __getattr__(name): return object",
    "torchaudio/functional.py": "def __getattr__(name): return object",
    "torchaudio/transforms.py": "def __getattr__(name): return object",
}


def stand_in_folder() -> Path | None:
    """A folder with stand-ins for packages of ComfyUI that are not installed."""
    missing = [name for name in ("torchvision", "torchaudio") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    print(f"not installed, replaced by stand-ins: {', '.join(missing)}")
    folder = Path(tempfile.mkdtemp())
    for path, text in STAND_INS.items():
        if path.split("/")[0] in missing:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text + "\n")
    return folder


class Real:
    """A ComfyUI checkout with the interface that `checks` expect of a host."""

    def __init__(self) -> None:
        import comfy.model_base
        import comfy.supported_models

        models = comfy.supported_models
        wan = {
            "image_model": "wan2.1",
            "model_type": "t2v",
            "dim": 48,
            "ffn_dim": 64,
            "freq_dim": 16,
            "num_heads": 2,
            "num_layers": 3,
            "text_dim": 32,
            "text_len": 16,
            "in_dim": 16,
            "out_dim": 16,
            "patch_size": (1, 2, 2),
            "cross_attn_norm": True,
            "qk_norm": True,
            "eps": 1e-6,
        }
        hunyuan = {
            "image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2],
            "vec_in_dim": 24, "context_in_dim": 32, "hidden_size": 48, "mlp_ratio": 2.0, "num_heads": 2,
            "depth": 2, "depth_single_blocks": 2, "axes_dim": [4, 10, 10], "theta": 256, "qkv_bias": True,
            "guidance_embed": False, "byt5": False, "meanflow": False, "use_cond_type_embedding": False,
            "vision_in_dim": None, "meanflow_sum": False,
        }  # fmt: skip
        cosmos = {
            "image_model": "cosmos_predict2", "max_img_h": 32, "max_img_w": 32, "max_frames": 8,
            "in_channels": 16, "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1,
            "model_channels": 48, "concat_padding_mask": True, "crossattn_emb_channels": 32,
            "pos_emb_cls": "rope3d", "pos_emb_learnable": False, "pos_emb_interpolation": "crop",
            "min_fps": 1, "max_fps": 30, "use_adaln_lora": False,
            "num_blocks": 3, "num_heads": 2, "extra_per_block_abs_pos_emb": False,
            "rope_h_extrapolation_ratio": 1.0, "rope_w_extrapolation_ratio": 1.0,
            "rope_t_extrapolation_ratio": 1.0,
        }  # fmt: skip
        ltx = {
            "image_model": "ltxv",
            "in_channels": 128,
            "cross_attention_dim": 48,
            "attention_head_dim": 24,
            "num_attention_heads": 2,
            "caption_channels": 32,
            "num_layers": 3,
        }
        # name -> (supported model, its unet config, latent channels, tokens per latent cell)
        self.table: dict[str, tuple[Any, dict[str, Any], int, int]] = {
            "wan 2.1": (models.WAN21_T2V, wan, 16, 2),
            "wan 2.2 (TI2V)": (models.WAN22_T2V, {**wan, "in_dim": 48, "out_dim": 48}, 48, 2),
            "hunyuan video": (models.HunyuanVideo, hunyuan, 16, 2),
            "cosmos predict2": (models.CosmosT2IPredict2, cosmos, 16, 2),
            "ltx video": (models.LTXV, ltx, 128, 1),
        }
        self.names = tuple(self.table)
        self.shapes: dict[int, tuple[int, ...]] = {}  # of the latents, by model

    def build(self, name: str) -> Any:
        import comfy.model_patcher
        import torch

        kind, config, channels, cell = self.table[name]
        made = kind(dict(config))
        made.set_inference_dtype(torch.float32, None)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = made.get_model({}, "")
            draw = torch.Generator().manual_seed(0)
            for place, weight in sorted(model.named_parameters()):
                wide = weight.ndim > 1
                spread = 3.0 if any(part in place for part in (".q.", ".k.", "to_q", "to_k", "q_proj", "qkv")) else 1.0
                size = spread / weight[0].numel() ** 0.5 if wide else 0.02
                if wide or "norm" not in place:
                    weight.data.copy_(torch.randn(weight.shape, generator=draw) * size)
                else:
                    weight.data.fill_(1.0)
        self.shapes[id(model)] = (channels, 3, 8 * cell, 8 * cell)
        return comfy.model_patcher.ModelPatcher(model.eval(), torch.device("cpu"), torch.device("cpu"))

    def sample(self, model: Any, *, batched: bool = True, steps: int = 4, videos: int = 1, seed: int = 0) -> Any:
        import comfy.model_management
        import comfy.sample
        import torch

        shape = self.shapes[id(model.model)]
        draw = torch.Generator().manual_seed(seed)
        noise = torch.randn(videos, *shape, generator=draw)
        texts = [torch.randn(1, 12, 32, generator=draw) for _ in range(2)]
        extra = {"pooled_output": torch.randn(1, 24, generator=draw)}
        if type(model.model).__name__ == "LTXV":  # with a mask, HunyuanVideo cannot batch its branches
            extra["attention_mask"] = torch.ones(1, 12, dtype=torch.long)
        conditions = [[[text, dict(extra)]] for text in texts]
        # ComfyUI runs both guidance branches as one batch if it sees enough memory. Its dense attention asks
        # as well, with `torch_free_too`, and cuts its products differently: there the answer stays the same.
        free = comfy.model_management.get_free_memory
        memory = 1e15 if batched else 0.0

        def pretended(_: Any = None, torch_free_too: bool = False) -> Any:
            return (1e15, 1e15) if torch_free_too else memory

        comfy.model_management.get_free_memory = pretended
        try:
            with torch.no_grad():
                return comfy.sample.sample(
                    model,
                    noise,
                    steps,
                    3.0,
                    "euler",
                    "simple",
                    conditions[0],
                    conditions[1],
                    torch.zeros_like(noise),
                    disable_pbar=True,
                    seed=seed,
                )
        finally:
            comfy.model_management.get_free_memory = free


def prompt_through_the_server(comfyui: Path, port: int) -> bool:
    """Starts ComfyUI with the node package and sends it a prompt that uses both nodes on a tiny model."""
    folder = Path(tempfile.mkdtemp())
    for name in ("custom_nodes", "models", "output", "input", "temp", "user"):
        (folder / name).mkdir()
    (folder / "custom_nodes" / "residua").symlink_to(HERE.parent)
    (folder / "custom_nodes" / "tiny_model.py").write_text(TINY_NODE.format(here=HERE))
    command = [
        sys.executable,
        "main.py",
        "--cpu",
        "--port",
        str(port),
        "--listen",
        "127.0.0.1",
        "--base-directory",
        str(folder),
        "--disable-api-nodes",
        "--disable-auto-launch",
        "--database-url",
        "sqlite:///:memory:",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")])}
    with open(folder / "log.txt", "w") as log:
        server = subprocess.Popen(command, cwd=comfyui, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        known = _wait(lambda: _get(f"{url}/object_info/ResiduaReport"), server, 900)
        identity = _post(f"{url}/prompt", {"prompt": PROMPT})["prompt_id"]
        done = _wait(lambda: _get(f"{url}/history/{identity}").get(identity), server, 900)
        text = done["outputs"].get("5", {}).get("text", [""])[0]
        good = "ResiduaReport" in known and done["status"]["status_str"] == "success" and "calls sparse" in text
        print(f"{'ok  ' if good else 'FAIL'}  prompt through the server: {' '.join(text.split())[:150]}")
        if not good:
            print(json.dumps(done["status"])[:2000], (folder / "log.txt").read_text()[-2000:], sep="\n")
        return good
    except RuntimeError as error:
        print(f"FAIL  prompt through the server: {error}", (folder / "log.txt").read_text()[-3000:], sep="\n")
        return False
    finally:
        server.terminate()
        server.wait(30)


# A node that makes the tiny Wan of these checks, with a matching latent and two conditionings.
TINY_NODE = """
import sys
sys.path.insert(0, "{here}")

class TinyWan:
    CATEGORY, FUNCTION = "residua/tests", "make"
    RETURN_TYPES = ("MODEL", "LATENT", "CONDITIONING", "CONDITIONING")

    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{}}}}

    def make(self):
        import torch
        from real import Real
        draw = torch.Generator().manual_seed(0)
        texts = [[[torch.randn(1, 12, 32, generator=draw), {{}}]] for _ in range(2)]
        return Real().build("wan 2.1"), {{"samples": torch.zeros(1, 16, 3, 16, 16)}}, *texts

NODE_CLASS_MAPPINGS = {{"TinyWan": TinyWan}}
"""

PROMPT = {
    "1": {"class_type": "TinyWan", "inputs": {}},
    "2": {
        "class_type": "ResiduaSparseAttention",
        "inputs": {
            "model": ["1", 0], "quality": "by density", "density": 0.3, "start_percent": 0.3,
            "end_percent": 1.0, "dense_blocks": 1, "min_tokens": 0, "on_error": "stop",
        },
    },
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "model": ["2", 0], "positive": ["1", 2], "negative": ["1", 3], "latent_image": ["1", 1],
            "seed": 1, "steps": 4, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
        },
    },
    "5": {"class_type": "ResiduaReport", "inputs": {"model": ["2", 0], "latent": ["3", 0], "rows": "layer"}},
    "6": {"class_type": "PreviewImage", "inputs": {"images": ["5", 1]}},
}  # fmt: skip


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def _post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def _wait(ask: Any, server: subprocess.Popen[bytes], seconds: float) -> Any:
    """The first answer that is not empty."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            found = ask()
            if found:
                return found
        except OSError:
            pass
        time.sleep(1)
    raise RuntimeError("the server ended" if server.poll() is not None else f"no answer in {seconds} s")


def main() -> int:
    given = parse()
    comfyui = given.comfyui.resolve()
    if not (comfyui / "comfy").is_dir():
        print(f"{comfyui}: no ComfyUI checkout (it has no folder named comfy)")
        return 2
    sys.argv = [sys.argv[0], "--cpu"]  # ComfyUI reads the command line when it is imported
    folder = stand_in_folder()
    sys.path[:0] = [str(comfyui), str(HERE), *([str(folder)] if folder else [])]
    import comfy.options

    comfy.options.enable_args_parsing()
    from conftest import load_helper, load_package

    load_package()
    checks, host = load_helper("checks"), Real()
    import comfyui_version

    print(f"ComfyUI {comfyui_version.__version__}")
    failed = 0
    for name in given.models.split(",") if given.models else host.names:
        try:
            found = checks.check_model(host, name)
            report = found.pop("report")
            figures = ", ".join(f"{what} {value:.1e}" for what, value in found.items())
            print(f"ok    {name}: {figures}; {report.total.sparse} sparse calls, {report.total.warm} warm")
        except Exception as error:
            failed += 1
            print(f"FAIL  {name}: {type(error).__name__}: {error}")
            if os.environ.get("RESIDUA_TRACE"):
                raise
    if given.seeds:
        apart = [one for name in host.names for one in checks.tipped(host, name, given.seeds)]
        tipped = [f"{one:.1e}" for one in apart if one > 1e-5]
        print(f"split - batched above 1e-5 in {len(tipped)} of {len(apart)} runs", *tipped)
    if given.server:
        failed += not prompt_through_the_server(comfyui, given.port)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
