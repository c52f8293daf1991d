"""Tests on real vLLM engines; what each topology must show is in ``cluster.py``."""
