"""Isolation for code nobody trusts: who runs it, with which rights, and how what it says comes out.

`client` is the only module that the rest of mrl uses. `supervisor`, `server`, `child` and what they import run in
processes of their own, loaded from these files into a bare interpreter: they know the standard library and
`mrl.sandbox.plain`, and nothing else of mrl.
"""
