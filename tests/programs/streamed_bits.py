"""How many different parameters come out of a training by plans of packs that compute the same: one.

In a process of its own, since code that is not optimised computes products otherwise for other
numbers of rows. So do products of few elements; and what Adam makes of its step count is rounded
otherwise where a pack has other parameters, hence SGD.
"""

from dataclasses import replace

from capture import environment
from capture.errors import CaptureError

CaptureError.check(environment.prepare(num_devices=8))

import optax
from test_streamed_training import bits, packs_plan, unet

PLANS = [
    packs_plan((1,) * 7, (1,) * 6, (1, 2), batch=5),
    packs_plan((3, 4), (3,), (2, 2), 2, batch=5),
    packs_plan((2, 2, 3), (2, 2), (5, 2), 3, batch=5, without=("p2p", "offload")),
    packs_plan((1, 2, 2, 2), (2, 3), (3, 2), 8, batch=5, without=("jit", "grouping")),
]

if __name__ == "__main__":
    workload = replace(unet(64), optimizer=optax.sgd(0.1))
    print(len({bits(workload, plan) for plan in PLANS}))
