"""What the tests of training share: its programs."""

import pytest


@pytest.fixture(scope="session")
def programs(start_programs):
    with start_programs("training.train", "training.average", "training.score", "training.translate") as server:
        yield server
