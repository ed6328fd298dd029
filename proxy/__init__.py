"""Purpose: faces the sandbox: front door, gate, lanes, help host, mitmproxy adapter.

May enter: hostile bytes from sandboxes; snapshots from the vault.
Imports: rules, wire, net, audit (events), mitmproxy (adapter only).
Start reading: front.py (one connection), gate.py (one request), lanes/.
"""
