"""Purpose: traffic comes to the gateway without the client's help: redirects inside a namespace and on a host.

May enter: ports and addresses as values; nothing from a sandbox.
Imports: the standard library.
Start reading: inside.py (the rules in a namespace that `exeat run` made), gateway.py (those on a host).
"""
