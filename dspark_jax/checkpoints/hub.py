"""Models fetched from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

WANTED_FILES = ("*.json", "*.safetensors", "*.jinja")


def fetch(repository: str) -> Path:
    """The local folder of a hub model, downloaded unless it is cached.

    Raises:
        ModuleNotFoundError: ``huggingface_hub`` is not installed.
        ConnectionError: the model is not cached and could not be fetched; the cause is quoted.
    """
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"fetching {repository!r} from Hugging Face needs the package huggingface_hub: "
            "pip install 'dspark-jax[hub]', or give a local folder"
        ) from error
    try:
        return Path(snapshot_download(repository, allow_patterns=list(WANTED_FILES)))
    except Exception as error:  # the hub client raises a dozen unrelated types for one outcome
        raise ConnectionError(
            f"could not fetch {repository!r} from Hugging Face ({type(error).__name__}: {error}); "
            "without a network, give a local folder or a .gguf file"
        ) from error
