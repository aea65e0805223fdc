"""The gathered state of a loader, as a JSON file in the folder of a trainer's checkpoint."""

import json
import os
from pathlib import Path

from fmsdata.core.state import State
from fmsdata.errors import CheckpointError
from fmsdata.storage.atomic import write_whole

NAME = "fmsdata.json"


def write_state(folder: str | os.PathLike[str], state: State, name: str = NAME) -> None:
    """Write a state, whole or not at all."""
    write_whole(Path(folder, name), json.dumps(state).encode())


def read_state(folder: str | os.PathLike[str], name: str = NAME) -> State:
    """The state in the folder of a checkpoint."""
    path = Path(folder, name)
    try:
        state: State = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not Path(folder).is_dir():
            raise CheckpointError(f"there is no checkpoint {folder}; check the path") from None
        raise CheckpointError(
            f"{folder} has no {name}, the position in the stream: the run was killed while it saved this checkpoint, "
            "or it was saved without fmsdata.integrations. Resume from an earlier checkpoint, or start a new run with "
            "its weights"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); resume from an earlier checkpoint") from None
    return state
