"""The engine in this process, on models of transformers."""
