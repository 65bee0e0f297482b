"""What runs inside vLLM's own processes.

These modules may run in another Python environment than the rest, so they import nothing but the standard library,
torch, numpy, vLLM and the few modules of mrl that do the same (`mrl.weights.checksum`, `mrl.weights.tensors`).
"""
