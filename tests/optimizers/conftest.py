"""What a constructor or a step says, and a process group of this process alone."""

import pytest
from torch import distributed


@pytest.fixture
def said(dispatch, caplog):
    """`said(words)`: the messages that hold them; what is said once has not been said before."""
    dispatch.say_once.cache_clear()

    def messages(words: str) -> list[str]:
        return [text for record in caplog.records if words in (text := record.getMessage())]

    return messages


@pytest.fixture
def one_rank(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()
