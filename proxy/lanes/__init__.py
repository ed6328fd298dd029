"""Lanes: how an allowed connection is spoken. A lane translates between bytes and the gate; it has no opinion.

tunnel.py relays bytes unseen, http1.py is the main lane, mitm.py adapts mitmproxy for rules with `protocol: h2`.
"""
