import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from labkit.models.tokenizer import CHARACTERS, UNKNOWN_ID_TEXT, Tokenizer


def byte_level(*special: str) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def write(folder, backend, **files):
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_char_level_ids():
    tokenizer = Tokenizer.char_level()
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.encode(CHARACTERS) == [1, *range(3, 27)]
    assert tokenizer.vocab_size == 27


def test_char_level_round_trip_keeps_spaces():
    tokenizer = Tokenizer.char_level()
    text = " 7+2*3-8= 7+2=9;  #9 "
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos_id]) == text
    assert tokenizer.decode([1, 3, 2], skip_special=False) == "<bos>0<eos>"


def test_char_level_names_the_unknown_character():
    with pytest.raises(ValueError, match="no token for 'x' in '7x2='"):
        Tokenizer.char_level().encode("7x2=")


def test_ids_without_text_stay_visible():
    tokenizer = Tokenizer.char_level()
    assert tokenizer.decode([14, 30, 12]) == f"{CHARACTERS[11]}{UNKNOWN_ID_TEXT}{CHARACTERS[9]}"


def test_save_and_read_give_the_same_tokenizer(tmp_path):
    tokenizer = Tokenizer.char_level()
    tokenizer.save(tmp_path)
    again = Tokenizer(tmp_path)
    assert again.encode("1+2=") == tokenizer.encode("1+2=")
    assert (again.pad_id, again.bos_id, again.eos_ids, again.add_bos) == (0, 1, (2,), True)


def test_transformers_reads_the_char_level_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.char_level()
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("7+2*3 -8=")["input_ids"] == tokenizer.encode("7+2*3 -8=")
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)


def test_folder_eos_ids_from_all_files(tmp_path):
    backend = byte_level("<end>", "<turn>")
    end, turn = backend.token_to_id("<end>"), backend.token_to_id("<turn>")
    write(
        tmp_path,
        backend,
        tokenizer_config={"eos_token": {"content": "<end>"}},
        generation_config={"eos_token_id": [turn, end]},
        config={"eos_token_id": 0},
    )
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_ids == (end, turn)
    assert tokenizer.eos_id == tokenizer.pad_id == end
    assert tokenizer.bos_id is None
    assert tokenizer.decode(tokenizer.encode("Zürich 2 + 2\n")) == "Zürich 2 + 2\n"


def test_folder_ids_from_config_alone(tmp_path):
    write(tmp_path, byte_level("<s>"), config={"eos_token_id": 5, "bos_token_id": 256, "pad_token_id": 7})
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.add_bos) == (5, 256, 7, False)


def test_add_bos_follows_the_template_and_the_setting_overrides_it(tmp_path):
    backend = byte_level("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    config = {"bos_token": "<s>", "eos_token": "<s>"}
    write(tmp_path, backend, tokenizer_config=config)
    assert Tokenizer(tmp_path).encode("a")[0] == 256
    write(tmp_path, backend, tokenizer_config={**config, "add_bos_token": False})
    assert Tokenizer(tmp_path).encode("a")[0] != 256


def test_chat_template_survives_a_round_trip(tmp_path):
    write(tmp_path, byte_level("<s>"), tokenizer_config={"eos_token": "<s>"})
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    copy = tmp_path / "copy"
    copy.mkdir()
    Tokenizer(tmp_path).save(copy)
    assert Tokenizer(copy).settings["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no end-of-text token"),
        ({"tokenizer_config": {"eos_token": "<none>"}}, "eos_token '<none>'.*is not in tokenizer.json"),
        ({"tokenizer_config": {"eos_token": "<s>", "add_bos_token": True}}, "no bos_token is named"),
    ],
)
def test_incomplete_folders(tmp_path, files, message):
    write(tmp_path, byte_level("<s>"), **files)
    with pytest.raises(ValueError, match=message):
        Tokenizer(tmp_path)


def test_broken_and_missing_files(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="can't be read"):
        Tokenizer(tmp_path)
    write(tmp_path, byte_level("<s>"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        Tokenizer(tmp_path)
