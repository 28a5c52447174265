"""Program of the manifests: the ranks add up their rank numbers, and each prints the sum."""

import numpy as np

import farandole.numpy as hvd

hvd.init()
total = hvd.allreduce(np.array([float(hvd.rank())]), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()}: the ranks add up to {total[0]:.0f}", flush=True)
hvd.shutdown()
