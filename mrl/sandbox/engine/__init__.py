"""Who runs and judges code that nobody trusts: the trainer's side, a supervisor, a fork-server, and its children.

`client` is the only module that the rest of mrl uses. `supervisor`, `server`, `child` and what they import run in
processes of their own, loaded from these files into a bare interpreter: they know the standard library, `confine`,
`judge` and `protocol`, and nothing else of mrl.
"""
