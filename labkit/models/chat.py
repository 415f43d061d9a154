"""Chat messages as the text that a model was trained on: its tokenizer's own Jinja template.

The surroundings are those of `transformers.apply_chat_template` (blocks trimmed, loop controls, sandbox,
`raise_exception`, `tojson`), with one difference: there is no `strftime_now`. Templates that write today's date take a
fixed one where it is missing, so that a run has the same prompts on every day.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(
    template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, str], options: Mapping[str, Any]
) -> str:
    """The conversation up to where the assistant answers. ValueError for what the template doesn't accept.

    `special`: bos_token, eos_token, ...; `options`: variables of the template's own, such as enable_thinking.
    """
    try:
        return _compiled(template).render(messages=messages, add_generation_prompt=True, **special, **options)
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes characters of HTML, which are plain text here."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
