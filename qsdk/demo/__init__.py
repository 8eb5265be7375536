"""A trained network and real images that travel with the package, to try everything on.

`network()` classifies small pictures of clothes with 92.9 % accuracy; `data()` holds 1,000 or so pictures to calibrate
and train on and the 10,000 test pictures of Fashion-MNIST. `qsdk demo` runs the whole road on them.
"""

from qsdk.demo.data import DemoData
from qsdk.demo.data import load as data
from qsdk.demo.model import load_pretrained as network

__all__ = ["DemoData", "data", "network"]
