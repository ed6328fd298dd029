"""`exeat scan`: whether a workspace, an image layer or a snapshot holds a secret, before it is kept.

search.py   what is looked for in a stream of bytes, and how it is recognised
shapes.py   tokens known by their look
walk.py     folders, archives and compressed files, down to streams
packs.py    git's objects
"""
