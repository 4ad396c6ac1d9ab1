"""A differential fuzzer of whole models: a seed makes a model, three ways of running it must agree.

spec.py       what a model is: steps, sizes, losses, options, as plain data       draw.py    one from a seed
layers.py, attention.py, operators.py   every kind of step, as Python source      source.py  a whole model as source
stepping.py   one training step, by eager BF16 or compiled                        poison.py  memory full of nan
watching.py   generated kernels, each beside its reference                        rounded.py eager with FP8 rounding
bounds.py     how far steps may lie apart, and why                                judge.py   what is wrong with a model
shrink.py     the smallest model that is still wrong                              run.py     many seeds, many processes
"""
