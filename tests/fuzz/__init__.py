"""A differential fuzzer of whole models: a seed makes a model, three ways of running it must agree.

spec.py, draw.py     a model as plain data: steps, sizes, losses, options; one drawn from a seed
layers.py, attention.py, operators.py, writer.py     every kind of step, as Python source
source.py            a whole model as Python source
stepping.py          a training step of it, by eager PyTorch or compiled
watching.py          generated kernels, each beside its reference
rounded.py           eager PyTorch with FP8's roundings
bounds.py, judge.py  how far steps may lie apart, and why; what is wrong with a model
shrink.py            the smallest model that is still wrong
run.py               many seeds in many processes
"""
