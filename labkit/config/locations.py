"""Where models are: by name, or as a Hugging Face folder. No torch here, so that a run is refused early."""

import os
from os import PathLike
from pathlib import Path

from labkit.config.errors import ConfigError

TINY_FOLDER = Path(__file__).parents[1] / "models" / "tiny"
SHIPPED = {"tiny": TINY_FOLDER, "tiny-moe": TINY_FOLDER.with_name("tiny_moe")}


def cache_folder() -> Path:
    """Where fetched models are kept: $LABKIT_CACHE, or ~/.cache/labkit."""
    return Path(os.environ.get("LABKIT_CACHE") or Path.home() / ".cache" / "labkit")


def model_folder(name_or_path: str | PathLike[str]) -> Path:
    """The folder of a model: "tiny" or "tiny-moe" (shipped), "smollm2" (fetched before), or a path.

    Raises ConfigError with the way out.
    """
    if isinstance(name_or_path, str) and name_or_path in SHIPPED:
        return SHIPPED[name_or_path]
    if name_or_path == "smollm2":
        folder = cache_folder() / "smollm2"
        if not folder.is_dir():
            raise ConfigError(f"model: SmolLM2 is not in {cache_folder()}; run `labkit fetch smollm2` (93 MB) once")
        return folder
    folder = Path(os.path.expanduser(name_or_path))  # Path.expanduser raises for an unknown ~user
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f'model: there is no model {str(name_or_path)!r}: give "tiny", "smollm2" or the path of a Hugging Face '
            "folder (config.json, model.safetensors, tokenizer.json)"
        )
    return folder
