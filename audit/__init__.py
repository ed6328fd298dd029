"""Purpose: what happened: events, chain, auditor, verify. Verifiable with nothing else of ours running.

May enter: events as values; segment files when verifying.
Imports: standard library, orjson, cryptography.
Start reading: events.py (what can be said), chain.py (how it is linked), verify.py.
"""
