import subprocess,json,statistics as st,os,sys
def start(which,cache):
    env={**os.environ,'PYTHONPATH':f'/root/m/{which}','T5ACCEL_CACHE':cache,'ORT_DISABLE_TELEMETRY':'1','PYTHONPATH':f'/root/m/{which}'}
    p=subprocess.Popen(['/work/main/.venv/bin/python','/root/m/ba_worker.py',which],env=env,stdin=subprocess.PIPE,stdout=subprocess.PIPE,text=True,cwd=f'/root/m/{which}')
    return p,json.loads(p.stdout.readline())
procs={'before':start('before','/root/m/cache-before')}
procs['before again']=start('before','/root/m/cache-before')
procs['after']=start('after','/root/m/cache-after')
def ask(k,n):
    p=procs[k][0];p.stdin.write(n+'\n');p.stdin.flush();return json.loads(p.stdout.readline())
N=int(sys.argv[1])
for n in procs['before'][1]:
    if n not in procs['after'][1]: print('missing',n);continue
    rows={k:[] for k in procs};h={}
    for i in range(N+1):
        order=list(procs) if i%2 else list(procs)[::-1]
        for k in order:
            t,hh,d=ask(k,n);h[k]=(hh,d)
            if i: rows[k].append(t)
    r=[b/a for b,a in zip(rows['before'],rows['after'])];c=[b/a for b,a in zip(rows['before'],rows['before again'])]
    print(f"{n:50} {st.median(rows['before'])/64*1e3:7.3f} ms -> {st.median(rows['after'])/64*1e3:7.3f}  before/after {st.median(r):.2f} ({min(r):.2f}-{max(r):.2f}) control {st.median(c):.2f} ({min(c):.2f}-{max(c):.2f}) equal {h['before'][0]==h['after'][0]} distinct {h['after'][1]}",flush=True)
