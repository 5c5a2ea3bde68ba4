"""dsv41's conformance suite on this backend: all that a port has to write."""

from dsv41.testing import BackendConformance


class TestToy(BackendConformance):
    backend = "toy"
    device = "toy:0"
