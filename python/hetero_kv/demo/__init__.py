"""The main job on real engines: tiny models, vLLM engines of unlike layouts, proof of transfer.

Importing this package needs neither torch nor vLLM: models are written, and engines are run,
by the interpreter of a vLLM environment (see `hetero_kv.demo.engines.vllm_python`).
"""
