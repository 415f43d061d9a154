"""Chat templates of the three families' kind, rendered as transformers renders them."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from labkit.models import chat
from labkit.models.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

CHATML = """{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""  # as Qwen's
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "<|eot_id|>" }}
{% for message in messages %}
    {% if message['role'] == 'system' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {{- {"é": "<b>"} | tojson }}
{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""  # as Llama 3's
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Zürich < 2 & 'b'\n"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "Why?"},
]
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer that begins every text with BOS, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", backend.token_to_id("<|begin|>"))]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def settle(folder, **settings):
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    return Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


def their_ids(tokenizer, **options):
    return tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False, **options)


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_chatml_as_transformers_renders_it(folder, options):
    ours, theirs = settle(folder, chat_template=CHATML)
    assert ours.encode_chat(MESSAGES, options) == their_ids(theirs, **options)


def test_headers_as_transformers_renders_them_but_for_the_day(folder):
    ours, theirs = settle(folder, chat_template=HEADERS)
    ids = ours.encode_chat(MESSAGES, {"date_string": "01 Jan 2025"})
    assert ids == their_ids(theirs, date_string="01 Jan 2025")
    assert ids.count(ours.bos_id) == 1, "the template writes it, so the tokenizer doesn't"
    assert "Today Date: 26 Jul 2024" in ours.decode(ours.encode_chat(MESSAGES)), "the same prompt on every day"


def test_a_template_in_a_file_of_its_own_and_one_of_several(folder):
    (folder / "chat_template.jinja").write_text(CHATML)
    ours, theirs = settle(folder)
    ids = ours.encode_chat(MESSAGES)
    assert ids == their_ids(theirs)
    (folder / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    assert settle(folder, chat_template=several)[0].encode_chat(MESSAGES) == ids


def test_without_a_template_there_is_no_chat(folder):
    with pytest.raises(ValueError, match=r"has no chat template; set task_options\.chat to false"):
        settle(folder)[0].encode_chat(MESSAGES)


def test_what_a_template_refuses_is_said():
    with pytest.raises(ValueError, match="refuses these messages: no tools here"):
        chat.render(CHATML, [{"role": "tool", "content": "x"}], {}, {})
    with pytest.raises(ValueError, match="refuses these messages: Expected an expression"):
        chat.render("{% if %}", MESSAGES, {}, {})
    with pytest.raises(ValueError, match=r"refuses these messages: .*unsafe"):
        chat.render("{{ messages.__class__.__mro__ }}", MESSAGES, {}, {})
