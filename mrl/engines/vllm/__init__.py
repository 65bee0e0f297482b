"""The engine that is vLLM: in a process of its own, or a server somewhere."""
