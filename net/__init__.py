"""Purpose: sockets without opinions: streams, TLS layer, HTTP/1.1 exchange, dialer and address table, pool, contexts.

May enter: sockets and bytes. The only room that resolves, dials or makes TLS contexts.
Imports: wire, rules (types), httptools, cryptography; aiohttp in client.py, which the vault alone loads.
Start reading: stream.py, then tls.py, http1.py, dial.py.
"""
