"""Purpose: vault (holds every secret, decides last), executors (calls), kinds, sources, exchanges, admin API.

May enter: hand-offs, admin calls, upstream answers (executor only).
Imports: rules, wire, net, audit, state, aiohttp, cryptography.
Start reading: executor.py (one call, top to bottom), vault/open.py (the last word).
"""
