"""Operations on packed weights, a folder each: contract in `__init__.py`, PyTorch `reference.py`, fast source beside.

layout.py has the packed form that they all read.
"""
