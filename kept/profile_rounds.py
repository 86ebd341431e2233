import time, numpy as np
from statistics import median
from t5accel.api import open_backend
from t5accel.decoding.running import RunningBatch, Part
from t5accel.decoding.job import Job
from t5accel.decoding.writers import writers_of
from t5accel.decoding.continuations import Continuations
from t5accel.serving.scheduler import Scheduler
from t5accel.serving.budget import Limits
import sys
backend, tok, _ = open_backend(sys.argv[1] if len(sys.argv)>1 else "mini", progress=False)
rng=np.random.default_rng(0)
def t(f,n=9):
    out=[]
    for _ in range(n):
        a=time.perf_counter(); f(); out.append(time.perf_counter()-a)
    return median(out)*1e3
for L in (24,):
    for B in (1,2,4,8,16):
        ids=rng.integers(3,backend.vocab_size,(B,L)); m=np.ones_like(ids)
        print(f"encode {B}x{L}: {t(lambda: backend.encode(ids,m)):.2f} ms")
# steps through the scheduler
for rows in (1,2,4,8,16,32):
    s=Scheduler(backend, Limits(rows=32, encoder_cache_bytes=0), thread=False)
    for i in range(rows):
        s.submit(Job(rng.integers(3,backend.vocab_size,24).tolist(), max_new_tokens=120, min_new_tokens=120))
    s.round(); s.round()
    print(f"round with {rows} rows: {t(s.round,40):.3f} ms")
    # admit one
    if rows<32:
        ts=[]
        for _ in range(5):
            j=s.submit(Job(rng.integers(3,backend.vocab_size,24).tolist(), max_new_tokens=2, min_new_tokens=2))
            a=time.perf_counter(); s.round(); ts.append(time.perf_counter()-a)
            while not j.is_done: s.round()
        print(f"   round in which one joins: {median(ts)*1e3:.3f} ms")
