"""Text to token ids and back, for the tiny policy and for Hugging Face folders alike.

Everything is a `tokenizers.Tokenizer` (tokenizer.json) plus four facts that tokenizer.json does not hold:
which ids pad, begin and end a text, and whether a text begins with BOS. A Hugging Face folder spreads them
over three files:

    tokenizer_config.json    pad_token, bos_token, eos_token, add_bos_token   (as text)
    generation_config.json   eos_token_id (one id or a list), bos_token_id, pad_token_id
    config.json              the same ids, older

A chat goes through the model's own template (tokenizer_config.json or chat_template.jinja), which writes BOS itself.

The tiny policy's tokenizer has one token per character, so that "what did the model see" needs no decoding:
PAD = 0, BOS = 1, EOS = 2, then the characters of `CHARACTERS` from 3 on.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from labkit.models import chat

CHARACTERS = "0123456789+-*=;#()>:?,| "
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
UNKNOWN_ID_TEXT = "\N{REPLACEMENT CHARACTER}"  # a policy may emit an id its tokenizer has no text for


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file; ValueError if it holds anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy it again from its source") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; copy it again from its source")
    return content


class Tokenizer:
    """`source`: a folder with tokenizer.json, or a `tokenizers.Tokenizer` with its tokenizer_config."""

    def __init__(
        self, source: str | PathLike[str] | tokenizers.Tokenizer, settings: dict[str, Any] | None = None
    ) -> None:
        ids: dict[str, Any] = {}
        if isinstance(source, tokenizers.Tokenizer):
            self.backend, self.settings = source, dict(settings or {})
        else:
            self.backend, self.settings, ids = _read_folder(Path(source))
        eos = [*self._ids("eos", self.settings), *self._ids("eos", ids)]
        if not eos:
            raise ValueError(
                "the tokenizer has no end-of-text token; "
                "set eos_token in tokenizer_config.json or eos_token_id in config.json"
            )
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos))
        self.eos_id = self.eos_ids[0]
        self.bos_id: int | None = self._first_id("bos", ids)
        pad_id = self._first_id("pad", ids)
        self.pad_id: int = self.eos_id if pad_id is None else pad_id
        self.add_bos = bool(self.settings.get("add_bos_token", self._template_adds_bos()))
        if self.add_bos and self.bos_id is None:
            raise ValueError("add_bos_token is true but no bos_token is named; set bos_token in tokenizer_config.json")

    @classmethod
    def char_level(cls, characters: str = CHARACTERS) -> "Tokenizer":
        """One token per character, PAD = 0, BOS = 1, EOS = 2; anything else is an error."""
        vocab = {token: i for i, token in enumerate([PAD, BOS, EOS, *characters])}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab))
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in (PAD, BOS, EOS)])
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        backend.decoder = decoders.Fuse()
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])])
        return cls(
            backend,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "pad_token": PAD,
                "bos_token": BOS,
                "eos_token": EOS,
                "add_bos_token": True,
                "clean_up_tokenization_spaces": False,
            },
        )

    @property
    def vocab_size(self) -> int:
        """Ids that have a text; a model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        try:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # what the library raises for a word outside a closed vocabulary
            raise ValueError(self._unknown_character(text)) from error
        if self.add_bos:
            assert self.bos_id is not None
            return [self.bos_id, *ids]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any] | None = None) -> list[int]:
        """The ids of a conversation up to where the assistant answers. ValueError if there is no chat template."""
        template = self.settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {each["name"]: each["template"] for each in template}.get("default")
        if not template:
            raise ValueError("the model's tokenizer has no chat template; set task_options.chat to false")
        text = chat.render(template, messages, self._special_texts(), options or {})
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        parts = []
        for known, run in groupby(ids, key=lambda i: self.backend.id_to_token(i) is not None):
            run_ids = list(run)
            if known:
                parts.append(self.backend.decode(run_ids, skip_special_tokens=skip_special))
            else:
                parts.append(UNKNOWN_ID_TEXT * len(run_ids))
        return "".join(parts)

    def ids_containing(self, text: str) -> frozenset[int]:
        """The tokens whose own text contains `text`: those that end a generation which stops at it."""
        return frozenset(i for i in range(self.vocab_size) if text in self.backend.decode([i]))

    def save(self, folder: str | PathLike[str]) -> None:
        """tokenizer.json and tokenizer_config.json, readable by other Hugging Face libraries."""
        folder = Path(folder)
        self.backend.save(str(folder / "tokenizer.json"))
        settings = {
            **self.settings,
            "pad_token": self.backend.id_to_token(self.pad_id),
            "eos_token": self.backend.id_to_token(self.eos_id),
            "bos_token": None if self.bos_id is None else self.backend.id_to_token(self.bos_id),
            "add_bos_token": self.add_bos,
        }
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _ids(self, kind: str, settings: dict[str, Any]) -> Sequence[int]:
        """The ids given for "pad", "bos" or "eos", as text (`eos_token`) or as numbers (`eos_token_id`)."""
        token = settings.get(f"{kind}_token")
        if token is not None:
            text = token["content"] if isinstance(token, dict) else token
            token_id = self.backend.token_to_id(text)
            if token_id is None:
                raise ValueError(
                    f"{kind}_token {text!r} of tokenizer_config.json is not in tokenizer.json; "
                    "take both files from the same model"
                )
            return [token_id]
        ids = settings.get(f"{kind}_token_id")
        if ids is None:
            return []
        return ids if isinstance(ids, list) else [ids]

    def _special_texts(self) -> dict[str, str]:
        """What a chat template knows as bos_token, eos_token, ..."""
        named = {key: self.settings.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return {key: token["content"] if isinstance(token, dict) else token for key, token in named.items() if token}

    def _first_id(self, kind: str, ids: dict[str, Any]) -> int | None:
        return next(iter([*self._ids(kind, self.settings), *self._ids(kind, ids)]), None)

    def _template_adds_bos(self) -> bool:
        return self.bos_id is not None and self.backend.encode("").ids[:1] == [self.bos_id]

    def _unknown_character(self, text: str) -> str:
        vocab = self.backend.get_vocab()
        unknown = next((c for c in text if c not in vocab), text)
        known = "".join(sorted(token for token in vocab if len(token) == 1))
        return f"the tokenizer has no token for {unknown!r} in {text!r}; it knows {known!r}"


def _read_folder(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any], dict[str, Any]]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json; save the tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"{path} can't be read ({error}); copy it again from its source") from error
    settings = read_json(folder / "tokenizer_config.json")
    if (template := folder / "chat_template.jinja").is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    generation = {k: v for k, v in read_json(folder / "generation_config.json").items() if v is not None}
    return backend, settings, {**read_json(folder / "config.json"), **generation}
