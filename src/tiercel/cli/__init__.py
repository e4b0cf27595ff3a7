"""The command line: one file a subcommand. Turns words into calls of the parts below, and their answers into text.

Knows flags, terminals and exit codes. Does not know models, tokens or the engine's parts. Read `main.py` first.
"""
