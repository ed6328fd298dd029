"""`exeat demo`: the shop story, in under a minute, with the real processes. story.py is the script; start there."""
