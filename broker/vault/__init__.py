"""Purpose: the vault process: key, store, sources, exchanges, state, the last decision, admin API.

May enter: fixed-layout control messages of workers and executors (wire/), admin calls on a Unix socket, bounded answers
    of the operator's secret managers and token endpoints (net/client.py).
Imports: rules, wire, net, audit.events/journal/link, state, broker.sources, broker.exchanges, aiohttp, cryptography.
Start reading: open.py (the numbered procedure of the last word), then service.py (the process).
"""
