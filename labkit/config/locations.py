"""Where models are: by name, as a Hugging Face folder, or in the cache of the Hugging Face hub. No torch here, so
that a run is refused early, and no network: what isn't there is fetched by `labkit fetch`, never by a run.
"""

import os
import re
from os import PathLike
from pathlib import Path

from labkit.config.errors import ConfigError

TINY_FOLDER = Path(__file__).parents[1] / "models" / "tiny"
SHIPPED = {"tiny": TINY_FOLDER, "tiny-moe": TINY_FOLDER.with_name("tiny_moe")}
HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]  # of a model on the hub: config, tokenizer and weights
HUB_SUBFOLDERS = "*/*"  # the same model in other formats
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_NEEDED = ("config.json", "tokenizer.json")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def cache_folder() -> Path:
    """Where fetched models are kept: $LABKIT_CACHE, or ~/.cache/labkit."""
    return Path(os.environ.get("LABKIT_CACHE") or Path.home() / ".cache" / "labkit")


def model_folder(name_or_path: str | PathLike[str]) -> Path:
    """The folder of "tiny" or "tiny-moe" (shipped), "smollm2" or a model of the hub (both fetched before), or a path.

    A folder wins over a model of the hub with the same name. Raises ConfigError with the way out.
    """
    if isinstance(name_or_path, str) and name_or_path in SHIPPED:
        return SHIPPED[name_or_path]
    if name_or_path == "smollm2":
        folder = cache_folder() / "smollm2"
        if not folder.is_dir():
            raise ConfigError(f"model: SmolLM2 is not in {cache_folder()}; run `labkit fetch smollm2` (93 MB) once")
        return folder
    folder = Path(os.path.expanduser(name_or_path))  # Path.expanduser raises for an unknown ~user
    if (folder / "config.json").is_file():
        return folder
    if is_hub_name(str(name_or_path)):
        return hub_folder(str(name_or_path))
    raise ConfigError(
        f'model: there is no model {str(name_or_path)!r}: give "tiny", "tiny-moe", "smollm2", the name of one on '
        "the Hugging Face hub (Qwen/Qwen3-0.6B) or the path of a Hugging Face folder (config.json, model.safetensors, "
        "tokenizer.json)"
    )


def is_hub_name(text: str) -> bool:
    """Whether it's written like OWNER/NAME; a relative path of two parts is as well."""
    return _HUB_NAME.fullmatch(text) is not None


def hub_folder(name: str) -> Path:
    """The newest snapshot of a model in the Hugging Face cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    way_out = f"run `labkit fetch {name}` once"
    try:
        folder = Path(
            snapshot_download(name, local_files_only=True, allow_patterns=HUB_FILES, ignore_patterns=HUB_SUBFOLDERS)
        )
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(
            f"model: there is no folder {name}, and the Hugging Face cache doesn't have it as a whole; {way_out}"
        ) from None
    lacking = [file for file in _NEEDED if not (folder / file).is_file()]
    if not any((folder / file).is_file() for file in _WEIGHTS):
        lacking.append(_WEIGHTS[0])
    if lacking:
        raise ConfigError(f"model: the Hugging Face cache has {name} without {', '.join(lacking)}; {way_out}")
    return folder
