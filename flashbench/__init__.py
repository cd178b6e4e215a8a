"""Attention benchmarks that can be trusted: time, memory, traffic and a roofline for every implementation on a machine."""

__version__ = "0.1.0"
