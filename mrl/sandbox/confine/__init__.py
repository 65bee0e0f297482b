"""What the kernel forbids a program: the layers of isolation, how a process enters one, and whether it holds here."""
