"""Run by Python at its start, in each of SGLang's processes. See `torchvision_operators`."""

import sys

import torchvision_operators

sys.meta_path.insert(0, torchvision_operators.Finder())
