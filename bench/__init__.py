"""Measuring beside others: `make bench`. README.md says how to read what it writes."""
