"""Purpose: what is allowed: facts, policy, decision, reasons and the catalogue of services. Pure.

May enter: values only; policy text as str or bytes. No sockets, files, clocks, environment, asyncio.
Imports: the standard library's value modules; PyYAML in yaml12.py and openapi.py; protocol parsers in operations/.
Start reading: facts.py (what is asked), policy.py (what was written), decide.py (the answer).
"""
