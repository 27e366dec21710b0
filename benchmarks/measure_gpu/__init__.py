"""Measures real LLaMA-Factory steps on a CUDA card, one process a job, for `benchmarks/score.py` to compare with.

python -m benchmarks.measure_gpu               run what has no result yet, most telling first, within ten minutes
python -m benchmarks.measure_gpu --list        the jobs
python -m benchmarks.measure_gpu NAME...       these
"""
