"""What a constructor or a step says."""

import pytest


@pytest.fixture
def said(dispatch, caplog):
    """`said(words)`: the messages that hold them; what is said once has not been said before."""
    dispatch.say_once.cache_clear()

    def messages(words: str) -> list[str]:
        return [text for record in caplog.records if words in (text := record.getMessage())]

    return messages
