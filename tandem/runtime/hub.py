"""The Hugging Face hub, or what HF_ENDPOINT names: whether it answers; upload of a model."""

from functools import cache
from pathlib import Path

from tandem.runtime.errors import UserError


@cache
def hub_answers() -> bool:
    """Tell whether the hub answers one try: its client makes six, and only then uses its cache."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # of the hub's HTTP client, another one by version; or it is to be offline
        return False
    return True


def require_token(name: str) -> None:
    """Raise UserError if nothing can be pushed from here, before any work."""
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode() or get_token() is None:
        raise UserError(
            "nothing can be pushed to the hub",
            where=f"--push {name}",
            found="HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "no token",
            expected="a token that may write, and a hub that can be reached",
            next="unset HF_HUB_OFFLINE; `hf auth login`, or set HF_TOKEN",
        )


def push(folder: Path, name: str) -> str:
    """Make a model repository, private if it is new, hold the files of a folder and no others: an
    adapter of an export before would change the model. Return its address. Raises UserError."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            commit_message=f"Tandem: {folder.name}",
            delete_patterns="*",
        )
        return str(repository)
    # a refusal, a name that is none, or whatever the hub's client raises for a network
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            "the hub did not take the model",
            where=f"{api.endpoint}, --push {name}",
            found=f"{type(error).__name__}: {first}",
            expected="a hub that can be reached, OWNER/NAME, and a token that may write there",
            next=f"the export stays where it is: hf upload {name} {folder}",
        ) from error
