"""Sources: where a secret value comes from. One file each, one entry in the registry (registry.py)."""
