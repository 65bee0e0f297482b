"""Tests against a program, in two confined processes: `runner` and `link` in the judge's, `asked` in the program's."""
