"""Fixtures that several test files share."""
import pytest


@pytest.fixture(scope="module")
def one_thread():
    "Small batches gain nothing from more threads, and lose a lot beside other busy processes."
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
