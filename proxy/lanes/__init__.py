"""Lanes: how an allowed connection is spoken. A lane translates between bytes and the gate; it has no opinion.

tunnel.py relays bytes unseen, http1.py is the main lane, mitm.py adapts mitmproxy for rules with `protocol: h2`.
http1.py hands over by handoff.py what a credential is for, resumes a judged body by judged.py, and answers tool calls
to the help host by tools.py.
"""
