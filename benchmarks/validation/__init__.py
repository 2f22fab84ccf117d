"""The cost model compared with published training runs: `python benchmarks/validation/validate.py`."""
