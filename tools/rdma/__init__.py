"""Kernels and machines of ``tools/rdma_vm.py``."""
