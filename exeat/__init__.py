"""Purpose: the command, settings, supervisor, sandbox boundary, demo: the only place where rooms are put together.

May enter: what an operator types; settings files named on the command line.
Imports: all rooms.
Start reading: cli.py, then supervisor.py and boundary.py.
"""
