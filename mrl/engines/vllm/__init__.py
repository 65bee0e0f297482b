"""vLLM engines: in a process of its own, or a remote server."""
