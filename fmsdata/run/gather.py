"""Gathered state: the lanes of all ranks in one plain dict, the same on every rank.

Some trainers save the state of one rank only. A gathered state can be loaded from there by any
rank, at any world size. Ranks exchange bytes of JSON, never pickles, and every rank checks what all
of them sent, so that a disagreement is an error on all ranks instead of a hang on some.
"""

import hashlib
import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.data import get_worker_info

from fmsdata.core.state import State
from fmsdata.errors import ConfigError, StateError
from fmsdata.run.ranks import Ranks

COMMON = ("version", "step", "history", "pipeline")  # equal on all ranks


def gather_state(own: Callable[[], State], ranks: Ranks, lanes: int) -> State:
    """The state of all ranks: a collective, to be called on each of them.

    `own` returns the state of this rank. If it raises, all ranks raise.
    """
    ranks.check("loader")
    if ranks.world_size == 1:
        return own()
    _check_group(ranks)
    error: Exception | None = None
    try:
        state = own()
        digest = hashlib.sha256(state["pipeline"].encode()).hexdigest()  # the text itself may be long
        message: State = {**state, "pipeline": digest, "rank": ranks.rank}
    except Exception as failure:
        error = failure
        message = {"error": f"{type(failure).__name__}: {failure}", "rank": ranks.rank}
    messages = [message]
    for group in ranks.groups or (None,):
        parts = _exchange(json.dumps(messages).encode(), group)
        messages = [message for part in parts for message in json.loads(part)]
    if error is not None:
        raise error
    return {**state, "lanes": _merged(messages, ranks, lanes)}


def agreed(state: State, ranks: Ranks) -> State:
    """A state that must be the same on all ranks: a collective that raises on all of them if it is not."""
    ranks.check("loader")
    if ranks.world_size == 1:
        return state
    _check_group(ranks)
    digests = {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in state.items()}
    messages: list[State] = [{**digests, "rank": ranks.rank}]
    for group in ranks.groups or (None,):
        parts = _exchange(json.dumps(messages).encode(), group)
        messages = [message for part in parts for message in json.loads(part)]
    for message in messages:
        different = [name for name in digests if message.get(name) != messages[0].get(name)]
        if different:
            raise StateError(
                f"ranks {messages[0]['rank']} and {message['rank']} differ in {', '.join(different)}; call "
                "state_dict(gather=True) on all ranks after the same step, and exclude the same rows on all of them"
            )
    return state


def _merged(messages: list[State], ranks: Ranks, count: int) -> dict[str, str]:
    """The lanes of all ranks. Every rank has the same messages, so all raise or none does."""
    if failed := [message for message in messages if "error" in message]:
        raise StateError(f"rank {failed[0]['rank']} of {ranks.world_size} has no state to gather: {failed[0]['error']}")
    first = messages[0]
    found: dict[str, str] = {}
    for message in messages:
        for name in COMMON:
            if message[name] != first[name]:
                values = "" if name == "pipeline" else f": {first[name]} and {message[name]}"
                raise StateError(
                    f"ranks {first['rank']} and {message['rank']} differ in {name}{values}; "
                    "call state_dict(gather=True) on all ranks after the same step of the same run"
                )
        for lane, text in message["lanes"].items():
            if found.setdefault(lane, text) != text:
                raise StateError(
                    f"lane {lane} is on two ranks, at different positions (one of them is rank {message['rank']}); "
                    "ranks that share data must take the same number of batches"
                )
    if len(found) != count:
        raise StateError(
            f"the {len(messages)} processes of the group hold {len(found)} of the {count} lanes, as ranks "
            f"{sorted({message['rank'] for message in messages})} of {ranks.world_size}; "
            "pass the mesh= or process_group= of all data-parallel ranks"
        )
    return {lane: found[lane] for lane in sorted(found, key=int)}


def _check_group(ranks: Ranks) -> None:
    inherited = ranks.process != os.getpid() and ranks.origin != "rank= and world_size="
    if inherited or get_worker_info() is not None:
        raise ConfigError(
            f"state_dict(gather=True) was called in process {os.getpid()}, a copy of process {ranks.process}, which is "
            f"{ranks}; call it there: a copy can't take part in its collectives"
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"state_dict(gather=True) on {ranks} needs torch.distributed, which is not initialized; "
            "call init_process_group first, or save state_dict() of every rank and load the list of them"
        )


def _exchange(own: bytes, group: ProcessGroup | None) -> list[bytes]:
    """The bytes of all ranks of a group, in their order."""
    device = _device_of(group)
    count = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    longest = int(max(sizes))
    padded = torch.frombuffer(bytearray(own.ljust(longest)), dtype=torch.uint8).to(device)
    received = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(count)]
    dist.all_gather(received, padded, group=group)
    return [bytes(data.cpu().numpy()[: int(size)]) for data, size in zip(received, sizes, strict=True)]


def _device_of(group: ProcessGroup | None) -> torch.device:
    """A device that the group can send tensors of: the CPU if possible."""
    kinds = [backend.partition(":")[0] for backend in dist.get_backend_config(group).split(",")]
    return torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0], torch.accelerator.current_device_index())
