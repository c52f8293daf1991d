"""Byte-exact tests of the data and control plane: real processes, no vLLM."""
