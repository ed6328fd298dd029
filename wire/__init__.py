"""Purpose: bytes <-> values without sockets: HTTP heads, ClientHello, hand-off and control messages, refusals. Pure.

May enter: bytes and values; every input is hostile and bounded.
Imports: rules.
Start reading: heads.py (what we accept as HTTP), handoff.py (worker to executor).
"""
