"""Weights on their way: tensors, checksums, files, differences, the network."""
