"""Models of real size that people bring, as their packages or papers make them, and how their
export is measured.

Beside ``zoo.py``, whose models are small and of every kind one. These need the extra ``zoo``.
"""
