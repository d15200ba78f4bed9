"""What has been measured on this machine, kept in a folder for the next run and the next model.

Models: one JSON file for each *subject* (a device with the versions that its numbers depend on, or a set of hosts),
with entries of one frozen type by key. Writing merges with what other processes have written meanwhile and replaces
the file at once, so that a reader finds the old or the new one. What cannot be read is measured again.
Ignores: age. Numbers that were measured while something else used the machine stay until the folder is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch

from pfeife_accelerate.cost.hardware import device_name
from pfeife_accelerate.cost.op_profile import OpProfile
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir.codec import decode, encode
from pfeife_accelerate.ir.files import write_whole
from pfeife_accelerate.log import get_logger, warn_once

__all__ = ["FORMAT", "Store", "op_profiles"]

_LOG = get_logger(__name__)
T = TypeVar("T")

#: Changes when the meaning of entries or of their keys does.
FORMAT: Final = 3
_LOCK_WAIT_S = 2.0


def op_profiles(folder: Path, device: torch.device) -> Store[OpProfile]:
    """The operations measured on this kind of device, with this version of torch and its settings."""
    subject = {"device": device_name(device), "torch": torch.__version__}
    if device.type == "cpu":
        subject["threads"] = str(torch.get_num_threads())
    else:
        precision = torch.get_float32_matmul_precision()
        subject["float32"] = f"products {precision}, convolutions tf32={torch.backends.cudnn.allow_tf32}"
    if torch.are_deterministic_algorithms_enabled():
        subject["algorithms"] = "deterministic"
    return Store(folder, "operations", subject, OpProfile)


class Store(Generic[T]):
    """The entries of one subject: `read` them, `add` to them."""

    def __init__(self, folder: Path, kind: str, subject: Mapping[str, str], entry: type[T]) -> None:
        self._entry = entry
        self._head = {"format": FORMAT, "kind": kind, **subject}
        digest = hashlib.sha256(json.dumps(self._head, sort_keys=True).encode()).hexdigest()[:12]
        readable = re.sub(r"[^a-z0-9]+", "-", next(iter(subject.values()), "").lower()).strip("-")[:40]
        self.path = folder / f"{kind}-{readable}-{digest}.json"

    def read(self) -> dict[str, T]:
        """All entries; none where there is no file, or one that cannot be read (with a warning)."""
        try:
            return self._decoded(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # PfeifeError is a ValueError
            text = error.what if isinstance(error, PfeifeError) else f"{type(error).__name__}: {error}"
            warn_once(
                _LOG,
                f"damaged {self.path}",
                f"{self.path} cannot be read and is written anew; what it held is measured again ({text})",
            )
            return {}

    def add(self, entries: Mapping[str, T]) -> None:
        """Write these entries beside those that are there; a folder that cannot be written costs a warning."""
        if not entries:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock():
                self._replace({**self.read(), **entries})
        except OSError as error:
            warn_once(
                _LOG,
                f"unwritable {self.path.parent}",
                f"what was measured cannot be kept for the next run in {self.path.parent} ({error}); "
                "name another folder by the option cache_dir",
            )

    def _decoded(self, data: Any) -> dict[str, T]:
        if {name: data[name] for name in self._head} != self._head:
            raise ValueError(f"it is about {[data[name] for name in self._head]}")
        return {key: decode(self._entry, value, key) for key, value in data["entries"].items()}

    def _replace(self, entries: Mapping[str, T]) -> None:
        data = {**self._head, "entries": {key: encode(value) for key, value in sorted(entries.items())}}
        write_whole(self.path, json.dumps(data, indent=0))

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep other writers out while reading and replacing.

        Where that is not possible within two seconds (some network file systems have no locks), go on without: the
        file stays whole, and what another process writes at the same moment is measured once more.
        """
        with self.path.with_suffix(".lock").open("w") as file:
            end_s = time.monotonic() + _LOCK_WAIT_S
            while time.monotonic() < end_s:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
                except OSError as error:
                    _LOG.debug("%s cannot be locked: %s", self.path, error)
                    break
            yield  # closing the file unlocks it
