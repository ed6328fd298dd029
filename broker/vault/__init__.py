"""Purpose: the vault process: key, store, sources, state, the last decision, admin API. Parses nothing from outside.

May enter: fixed-layout control messages of workers and executors (wire/), admin calls on a Unix socket.
Imports: rules, wire, net.process, audit.events/journal/link, state, broker.sources, aiohttp, cryptography.
Start reading: open.py (the numbered procedure of the last word), then service.py (the process).
"""
