"""Purpose: sandboxes, grants, approvals, budgets over SQLite; one writer (the vault).

May enter: values of rules; the database file.
Imports: rules (types), SQLAlchemy.
Start reading: schema.py, then store.py.
"""
