"""Models of the Hugging Face hub, brought into its cache once; `labkit.config.locations` finds them there."""

from pathlib import Path

from labkit.config.locations import HUB_FILES, HUB_SUBFOLDERS, hub_folder
from labkit.models.huggingface import read_config
from labkit.models.smollm2 import FetchError
from labkit.models.tokenizer import read_json


def fetch(name: str) -> Path:
    """The folder of a model in the Hugging Face cache, in its newest version if the hub can be reached.

    What an interrupted fetch left is gone on with. Raises ValueError with the way out, for a model that the decoder
    can't do before its weights are downloaded.
    """
    read_config(read_json(_download(name, ["config.json"]) / "config.json"))
    _download(name, HUB_FILES)
    return hub_folder(name)


def _download(name: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=HUB_SUBFOLDERS))
    except GatedRepoError:
        raise FetchError(
            f"{name} is gated: accept its terms on https://huggingface.co/{name}, then run `hf auth login` "
            "(or set HF_TOKEN) and fetch again"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise FetchError(
            f"the Hugging Face hub has no model {name}; check the name on https://huggingface.co/models "
            "(for a private one run `hf auth login` first)"
        ) from None
    except LocalEntryNotFoundError:
        raise FetchError(
            f"the Hugging Face hub can't be reached, and its cache doesn't have {name} as a whole; without a network, "
            f"run `labkit fetch {name}` on another machine and copy $HF_HOME/hub (~/.cache/huggingface/hub), or unset "
            "HF_HUB_OFFLINE if it is set"
        ) from None
    except HfHubHTTPError as error:
        raise FetchError(f"{name}: the Hugging Face hub answers {_one_line(error)}; try again later") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
