"""`miniwob`: the web tasks of MiniWoB++ in a real Chromium, one browser for all sessions of a process."""
