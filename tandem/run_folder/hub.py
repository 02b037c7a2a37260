"""Upload of an exported model to the Hugging Face hub, or to the server that HF_ENDPOINT names."""

from pathlib import Path

from tandem.runtime.errors import UserError

_RETRY = "the export stays where it is; try again"


def require_token(name: str) -> None:
    """Raise UserError if nothing can be pushed under that name from here, before any work."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(
            "this is no name of a model on the hub",
            where=f"--push {name}",
            found=str(error),
            expected="NAME, or OWNER/NAME",
        ) from None
    if constants.is_offline_mode():
        raise UserError(
            "the hub cannot be reached: it is switched off",
            where=f"--push {name}",
            found="HF_HUB_OFFLINE is set",
            next="unset it for this command",
        )
    if get_token() is None:
        raise UserError(
            "there is no token for the hub",
            where=f"--push {name}",
            expected="a token that may write",
            next="`hf auth login`, or set HF_TOKEN",
        )


def push(folder: Path, name: str) -> str:
    """Upload the files of a folder to a model repository, made private if it is new; return its
    address. Raises UserError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        repository = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message=f"Tandem: {folder.name}"
        )
        return str(repository)
    except HfHubHTTPError as error:
        status = error.response.status_code
        next = "take a token that may write there" if status in (401, 403) else _RETRY
        raise UserError(
            "the hub refuses the upload",
            where=f"{api.endpoint}, --push {name}",
            found=str(error).strip().splitlines()[0],
            next=next,
        ) from error
    # whatever the hub's client raises for a network, by version: httpx's errors, or requests'
    except Exception as error:
        raise UserError(
            "the hub cannot be reached",
            where=f"{api.endpoint}, --push {name}",
            found=f"{type(error).__name__}: {error}",
            expected="a server that answers",
            next=_RETRY,
        ) from error
