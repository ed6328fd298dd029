"""One file per group of commands. Each parses what was typed, calls one room, and prints; none decides anything."""
