"""What the tests of training share: its programs."""

import pytest


@pytest.fixture(scope="session")
def programs(start_programs):
    verbs = ("train", "average", "score", "translate", "diversify")
    with start_programs(*(f"training.{verb}" for verb in verbs)) as server:
        yield server
