"""Models of the Hugging Face hub: found in its cache as the client lays it out, fetched from a hub on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from local_hub import cache_layout, hub

from labkit.config import ConfigError
from labkit.config.locations import model_folder
from labkit.models import Policy, Tokenizer, load
from labkit.models.attention import PaddedAttention
from labkit.models.decoder import DecoderConfig
from labkit.models.huggingface import write_folder
from labkit.models.warmstart import initial_weights

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=40, hidden_size=48, intermediate_size=80, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8,
    rope_theta=5000.0,
)  # fmt: skip
FAMILIES = {
    "llama": DecoderConfig(**SIZES),
    "qwen2": DecoderConfig(**SIZES, qkv_bias=True),
    "qwen3": DecoderConfig(**SIZES | {"head_dim": 16}, qk_norm=True, tie_word_embeddings=True),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def written(family: str, folder: Path) -> Path:
    config = FAMILIES[family]
    noise = torch.Generator().manual_seed(1)
    weights = {  # biases start at 0 and norms at 1, where a mix-up would not show
        name: w if w.dim() > 1 else w + 0.3 * torch.randn(w.shape, generator=noise)
        for name, w in initial_weights(config, seed=0).items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    write_folder(Policy(config, weights, Tokenizer.char_level(), family, family), folder)
    return folder


def in_cache(family: str, cache: Path, tmp_path: Path, sharded: bool) -> str:
    folder = written(family, tmp_path / family)
    if sharded:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="50KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 1
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    name = f"Owner/{family}-0.6B"
    cache_layout(folder, name, cache)
    return name


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_model_computes_what_transformers_computes(
    family: str, sharded: bool, cache: Path, tmp_path: Path
) -> None:
    name = in_cache(family, cache, tmp_path, sharded)
    policy = load(name)
    assert (policy.name, policy.family, policy.tokenizer.eos_ids) == (name, family, (2, 5))
    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(name, cache_dir=cache, dtype=torch.float32).eval()
    decoder = policy.decoder(torch.float32)
    with torch.no_grad():
        attention = PaddedAttention(torch.zeros(2, dtype=torch.int64), 12)
        ours = decoder.logits(decoder(tokens, torch.arange(12).expand(2, 12), attention))
        theirs = model(tokens).logits
    assert theirs.std() > 0.3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_folder_wins_over_the_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = in_cache("llama", cache, tmp_path, sharded=False)
    assert cache in model_folder(name).parents
    monkeypatch.chdir(tmp_path)
    written("qwen2", tmp_path / name)
    assert model_folder(name) == Path(name)


def test_what_is_not_there_names_the_command(cache: Path) -> None:
    words = r"^model: there is no folder Qwen/Qwen3-0\.6B, and .*`labkit fetch Qwen/Qwen3-0\.6B` once$"
    with pytest.raises(ConfigError, match=words):
        model_folder("Qwen/Qwen3-0.6B")
    for name in ("no/such/folder", "./here/there", "/a/b", "bad name/x", "Qwen/"):
        with pytest.raises(ConfigError, match="there is no model"):
            model_folder(name)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_copy_that_lacks_a_file_names_it(cache: Path, tmp_path: Path, file: str) -> None:
    name = in_cache("qwen3", cache, tmp_path, sharded=False)
    (model_folder(name) / file).unlink()
    with pytest.raises(ConfigError, match=rf"has {name} without {file}; run `labkit fetch {name}`"):
        model_folder(name)


def test_looking_up_needs_no_torch_and_little_time(cache: Path) -> None:
    code = (
        "import sys; from labkit.config.locations import model_folder\n"
        "try: model_folder('Qwen/Qwen3-0.6B')\n"
        "except ValueError: sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "HF_HOME": str(cache)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=30).returncode == 0


def at(home: Path, endpoint: str) -> dict[str, str]:
    return {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}


def fetch(home: Path, endpoint: str, *names: str) -> list[str]:
    """What `fetch` says of each, in a process of its own: the client reads its environment once."""
    code = (
        "import sys; from labkit.models.hub import fetch\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(fetch(name))\n"
        "    except ValueError as error: print(error)"
    )
    command = [sys.executable, "-c", code, *names]
    return subprocess.check_output(command, env=at(home, endpoint), text=True).splitlines()


def test_fetch_brings_what_a_run_needs_and_nothing_else(cache: Path, tmp_path: Path) -> None:
    folder = written("qwen3", tmp_path / "repository")
    (folder / "onnx").mkdir()
    for other in ("pytorch_model.bin", "README.md", "onnx/model.safetensors", "onnx/config.json"):
        (folder / other).write_bytes(b"x")
    with hub({"Qwen/Qwen3-0.6B": folder}) as endpoint:
        said = subprocess.check_output(
            [sys.executable, "-m", "labkit.cli", "fetch", "Qwen/Qwen3-0.6B"], env=at(tmp_path, endpoint), text=True
        )
    snapshot = model_folder("Qwen/Qwen3-0.6B")
    assert said.split() == ["Qwen/Qwen3-0.6B", "is", "in", str(snapshot)]
    found = sorted(str(file.relative_to(snapshot)) for file in snapshot.rglob("*"))
    assert found == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    weights = load("Qwen/Qwen3-0.6B").weights
    assert all(torch.equal(weights[name], w) for name, w in load(folder).weights.items())


def test_what_a_hub_refuses_is_said_with_the_way_out(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["GptOssForCausalLM"]}')
    (other / "model.safetensors").write_bytes(b"x" * 1000)
    with hub({"meta-llama/Llama": "GatedRepo", "Qwen/MoE": other}) as endpoint:
        said = fetch(tmp_path, endpoint, "no/such", "meta-llama/Llama", "Qwen/MoE")
    assert said[0].startswith("the Hugging Face hub has no model no/such; check the name")
    assert said[1].startswith("meta-llama/Llama is gated: accept its terms on https://huggingface.co/meta-llama/Llama")
    assert "architectures = 'GptOssForCausalLM', which labkit's decoder can't do" in said[2]
    assert not list((tmp_path / "hub").rglob("*.safetensors")), "no weights of a model that can't be used"


def test_without_a_network_fetch_says_how_to_bring_the_cache(tmp_path: Path) -> None:
    (said,) = fetch(tmp_path, "http://127.0.0.1:9", "Qwen/Qwen3-0.6B")
    assert "can't be reached" in said
    assert "run `labkit fetch Qwen/Qwen3-0.6B` on another machine and copy" in said
