"""Work beside a step's own, as a CPU does it: in a row."""

import torch

from elle.engine.alongside import Alongside


def test_on_a_cpu_it_is_done_at_once_and_nothing_is_kept():
    alongside, total = Alongside(torch.device("cpu")), torch.zeros(())
    with alongside.work(total):
        total += 1
    assert total == 1
    assert alongside.read == []
    alongside.join()
