"""Agreement with transformers in FP32, both ways, and refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.models.attention import PaddedAttention
from labkit.models.huggingface import read_config, read_folder, write_folder
from labkit.models.policy import Policy
from labkit.models.rope import Llama3Scaling
from labkit.models.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
LLAMA3 = {  # of the four frequencies one stays, one lies between, two are divided
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 0.04, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MOE = (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM)
CASES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama-tied": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-mha": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"num_key_value_heads": 6}),
    "llama-3.1": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3-tied": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen3-moe": (*MOE, EXPERTS),
    "qwen3-moe-dense-first": (*MOE, {**EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": False}),
    "qwen3-moe-every-second": (*MOE, {**EXPERTS, "decoder_sparse_step": 2, "num_experts_per_tok": 3}),
}


def theirs(case):
    config_class, model_class, extra = CASES[case]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **extra})).eval()
    with torch.no_grad():  # biases start at 0 and norms at 1, where a mix-up would not show
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(5)
    return model


@pytest.fixture(params=CASES)
def saved(request, tmp_path):
    model = theirs(request.param)
    model.save_pretrained(tmp_path)
    Tokenizer.char_level().save(tmp_path)
    return model, tmp_path


def our_logits(policy: Policy, tokens, starts):
    T = tokens.shape[1]
    positions = (torch.arange(T) - starts[:, None]).clamp(min=0)
    decoder = policy.decoder(torch.float32)
    with torch.no_grad():
        return decoder.logits(decoder(tokens, positions, PaddedAttention(starts, T)))


def their_logits(model, tokens, starts):
    T = tokens.shape[1]
    positions = (torch.arange(T) - starts[:, None]).clamp(min=0)
    mask = (torch.arange(T) >= starts[:, None]).long()
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits


@pytest.mark.parametrize("starts", [[0, 0, 0], [0, 4, 9]])
def test_logits_agree(saved, starts):
    model, folder = saved
    tokens = torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(1))
    starts = torch.tensor(starts)
    real = torch.arange(12) >= starts[:, None]
    ours = our_logits(read_folder(folder), tokens, starts)[real]
    expected = their_logits(model, tokens, starts)[real]
    assert expected.std() > 0.5
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_transformers_loads_what_we_write(saved, tmp_path):
    model, folder = saved
    policy = read_folder(folder)
    write_folder(policy, tmp_path / "ours")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert type(loaded) is type(model)
    for key in (*SIZES, "tie_word_embeddings"):
        assert getattr(loaded.config, key) == getattr(model.config, key), key
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("case", "layers"), [("qwen3-moe", (0, 1, 2)), ("qwen3-moe-dense-first", (1, 2)), ("qwen3-moe-every-second", (1,))]
)
def test_folders_name_every_expert_and_layers_are_dense_where_they_say(case, layers, tmp_path):
    theirs(case).save_pretrained(tmp_path)
    Tokenizer.char_level().save(tmp_path)
    policy = read_folder(tmp_path)
    assert policy.config.moe.layers == layers
    write_folder(policy, tmp_path / "ours")
    for folder in (tmp_path, tmp_path / "ours"):
        names = load_file(folder / "model.safetensors").keys()
        for layer in range(3):
            expert = f"model.layers.{layer}.mlp.experts.3.gate_proj.weight" in names
            dense = f"model.layers.{layer}.mlp.gate_proj.weight" in names
            assert (expert, dense) == (layer in layers, layer not in layers)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
        assert getattr(loaded.config, key) == getattr(theirs(case).config, key)


def test_the_number_of_experts_has_two_spellings():
    config = json.loads(theirs("qwen3-moe").config.to_json_string()) | {"architectures": ["Qwen3MoeForCausalLM"]}
    number = config.pop("num_local_experts", None) or config.pop("num_experts")
    for key in ("num_local_experts", "num_experts"):
        assert read_config(config | {key: number})[1].moe.num_experts == 4
    with pytest.raises(ValueError, match="lacks num_experts"):
        read_config(config)


def test_our_own_round_trip(saved, tmp_path):
    _, folder = saved
    policy = read_folder(folder)
    write_folder(policy.to(torch.bfloat16), tmp_path / "ours")
    again = read_folder(tmp_path / "ours", torch.bfloat16)
    assert (again.config, again.family) == (policy.config, policy.family)
    assert again.weights.keys() == policy.weights.keys()
    assert all(torch.equal(again.weights[n], w.bfloat16()) for n, w in policy.weights.items())
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


def test_sharded_checkpoint(tmp_path):
    model = theirs("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    Tokenizer.char_level().save(tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    policy = read_folder(tmp_path)
    assert torch.equal(policy.weights["lm_head.weight"], model.lm_head.weight)
    shards[0].unlink()
    with pytest.raises(ValueError, match=f"lacks {shards[0].name}"):
        read_folder(tmp_path)


def test_rope_theta_old_and_new_spelling():
    config = json.loads(theirs("llama").config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    assert read_config(config)[1].rope_theta == 5000.0
    del config["rope_parameters"]
    assert read_config(config | {"rope_theta": 7000.0, "rope_scaling": None})[1].rope_theta == 7000.0
    with pytest.raises(ValueError, match="gives no rope_theta"):
        read_config(config)


def test_llama3_rope_old_and_new_spelling():
    config = json.loads(theirs("llama-3.1").config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    scaling = read_config(config)[1].rope_scaling
    assert scaling == Llama3Scaling(8.0, 0.04, 1.0, 16)
    old = {key: value for key, value in config.pop("rope_parameters").items() if key != "rope_theta"}
    assert read_config(config | {"rope_theta": 5000.0, "rope_scaling": old})[1].rope_scaling == scaling


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("llama", {"architectures": ["MistralForCausalLM"]}, "architectures = 'MistralForCausalLM'"),
        ("llama", {"architectures": None}, "architectures"),
        ("qwen3", {"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM.*a model of Llama"),
        ("qwen3", {"architectures": ["Qwen3MoeForCausalLM"]}, "lacks num_experts, num_experts_per_tok"),
        ("qwen3-moe", {"num_experts_per_tok": 0}, "num_experts_per_tok = 0, not a positive whole number"),
        ("qwen3-moe", {"num_experts_per_tok": 5}, "can't go to 5 of 4 experts"),
        ("qwen3-moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1, not a list"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1, 2]}, r"mlp_only_layers = \[0, 1, 2\].*Qwen3ForCausalLM"),
        ("qwen3-moe", {"head_dim": None}, "lacks head_dim"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
        ("llama-3.1", {"rope_parameters": LLAMA3 | {"factor": None}}, r"rope_parameters.factor = None, not a positive"),
        ("llama-3.1", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2 is not below"),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = 'fp8'"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
        (
            "qwen2",
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "use_sliding_window",
        ),
        ("qwen3", {"head_dim": None}, "lacks head_dim"),
        ("llama", {"vocab_size": None}, "lacks vocab_size"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0, not a positive whole number"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads = 0, not a positive"),
        ("llama", {"hidden_size": "x"}, "hidden_size = 'x', not a positive whole number"),
        ("llama", {"head_dim": True}, "head_dim = True, not a positive whole number"),
        ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5, not a positive whole number"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan, not a positive number"),
        ("llama", {"rope_parameters": None, "rope_theta": -1}, "rope_theta = -1, not a positive number"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters = \[1\], not an object"),
        ("llama", {"architectures": 5}, "architectures = 5"),
        (
            "qwen2",
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": "x"},
            "use_sliding_window",
        ),
    ],
)
def test_unsupported_configs_name_the_key(case, change, message):
    model = theirs(case)
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]} | change
    with pytest.raises(ValueError, match=message):
        read_config(config)


def test_sliding_window_that_no_layer_uses_is_accepted():
    config = json.loads(theirs("qwen2").config.to_json_string()) | {"architectures": ["Qwen2ForCausalLM"]}
    config |= {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert read_config(config)[0] == "qwen2"


@pytest.fixture
def qwen3_folder(tmp_path):
    theirs("qwen3").save_pretrained(tmp_path)
    Tokenizer.char_level().save(tmp_path)
    return tmp_path


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop("model.layers.1.self_attn.q_norm.weight"), r"lacks model.layers.1.self_attn.q_norm"),
        (lambda w: w.update({"model.layers.1.extra": torch.ones(3)}), r"no place.*for model.layers.1.extra"),
        (lambda w: w["model.norm.weight"][1:2].fill_(torch.nan), r"model\.norm\.weight holds NaN or infinity"),
        (lambda w: w["lm_head.weight"][1:2].fill_(-torch.inf), r"lm_head\.weight holds NaN or infinity"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), r"norm.weight is \(3,\).*says \(48,\)"),
    ],
)
def test_wrong_tensors_are_named(qwen3_folder, edit, message):
    edit_weights(qwen3_folder, edit)
    with pytest.raises(ValueError, match=message):
        read_folder(qwen3_folder)


def test_buffers_of_old_checkpoints_are_ignored(qwen3_folder):
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(qwen3_folder, lambda w: w.update({buffer: torch.ones(8)}))
    assert buffer not in read_folder(qwen3_folder).weights


def test_separate_head_in_a_tied_checkpoint(tmp_path):
    theirs("llama-tied").save_pretrained(tmp_path)
    Tokenizer.char_level().save(tmp_path)
    edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in read_folder(tmp_path).weights
    edit_weights(tmp_path, lambda w: w["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match="tie_word_embeddings is true but"):
        read_folder(tmp_path)


def test_a_tokenizer_too_large_for_the_model(qwen3_folder):
    Tokenizer.char_level("".join(map(chr, range(0x4E00, 0x4E00 + 60)))).save(qwen3_folder)
    with pytest.raises(ValueError, match=r"63 tokens but config.json says vocab_size = 40"):
        read_folder(qwen3_folder)


def test_incomplete_folders(qwen3_folder):
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_folder(qwen3_folder / "nothing")
    config = (qwen3_folder / "config.json").read_text()
    (qwen3_folder / "config.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"config\.json holds a list, not an object"):
        read_folder(qwen3_folder)
    (qwen3_folder / "config.json").write_text(config)
    blob = (qwen3_folder / "model.safetensors").read_bytes()
    (qwen3_folder / "model.safetensors").write_bytes(blob[: len(blob) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        read_folder(qwen3_folder)
    (qwen3_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="save the model as safetensors"):
        read_folder(qwen3_folder)
