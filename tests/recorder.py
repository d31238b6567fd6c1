"A context that writes down when it is entered and left."
from contextlib import contextmanager


def recorder(within):
    @contextmanager
    def entered(device):
        within.append(device)
        yield
        within.append("left")
    return entered
