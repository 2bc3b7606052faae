"""The modules behind the public functions, and their plain references."""

import pytest

from ..conftest import module_fixture

coefficients = module_fixture("orthogonalize.coefficients")
restarts = module_fixture("orthogonalize.gram_newton_schulz")


@pytest.fixture
def forgets_devices(dispatch, submodule):
    """What is remembered of a device does not outlive a test that pretends another one."""

    def forget() -> None:
        dispatch.pick.cache_clear()
        submodule("orthogonalize.arguments").default_dtype.cache_clear()

    forget()
    yield forget
    forget()


choose = module_fixture("orthogonalize.choose")
reference = module_fixture("reference.orthogonalize")
