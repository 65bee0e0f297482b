"""The in-process engine, on transformers' models."""
