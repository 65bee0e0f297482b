"""The policy over HTTP, for programs that fetch completions themselves."""
