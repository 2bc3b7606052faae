"""Checkpoints that a thread is writing, at most one per folder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


class PendingSave:
    """A checkpoint on its way to the disk."""

    def __init__(self, work: Callable[[], None], folder: Path) -> None:
        self.folder = folder
        self.error: BaseException | None = None
        self.told = False  # whether `wait` has returned or raised the error
        self._work = work
        # No daemon: a process that ends in the usual way finishes its checkpoint first.
        self._thread = threading.Thread(target=self._run, name=f"save {folder}", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
            logger.exception("saving to %s failed", self.folder)
        finally:
            del self._work  # and the copy of the state with it

    def done(self) -> bool:
        """Whether it has been written, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is on the disk.

        Args:
            timeout: seconds; None for any time.

        Raises:
            TimeoutError: it took longer; the saving goes on.
            OSError: it could not be written; the folder has what it had before. Other errors of
                the saving are raised here likewise.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"saving to {self.folder} takes longer than {timeout} seconds")
        self.told = True
        if self.error is not None:
            raise self.error


_latest: dict[Path, PendingSave] = {}  # folder -> the save that was started last


def start(folder: Path, work: Callable[[], None]) -> PendingSave:
    """Start a save after `finish(folder)`."""
    pending = _latest[folder.absolute()] = PendingSave(work, folder)
    return pending


def finish(folder: Path) -> None:
    """Wait for the save to a folder that is under way, if one is.

    Raises:
        OSError: it failed, and nobody has been told; likewise other errors.
    """
    pending = _latest.pop(folder.absolute(), None)
    if pending is not None and not pending.told:
        pending.wait()
